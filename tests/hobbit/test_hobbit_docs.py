# SPDX-License-Identifier: MIT
"""docs/python.md: its examples run, and the reference that it names can be built."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import models
import pytest

import pyhobbit

PAGE = models.ROOT / "docs/python.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_examples_run_one_after_the_other(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(tiny_gguf)
    done = subprocess.run(
        [sys.executable, "-P", "-c", "".join(EXAMPLES)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLES) == 6
    assert "the smallest that works is" in done.stdout


def test_everything_public_says_what_it_is() -> None:
    public = [getattr(pyhobbit, name) for name in pyhobbit.__all__]
    members = [
        member
        for name, member in vars(pyhobbit.Hobbit).items()
        if not name.startswith("_") and inspect.isroutine(member)
    ]
    assert len(members) > 8
    assert [each for each in [*public, *members] if not each.__doc__] == []


def test_the_reference_is_built(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pip install pdoc")
    script = models.ROOT / "docs/reference.py"
    done = subprocess.run(
        [sys.executable, "-P", script, tmp_path], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "pyhobbit.html").read_text(encoding="utf-8")
    for name in pyhobbit.__all__:
        assert f'id="{name}"' in page
    for name in ("from_pretrained", "set"):
        assert f'id="Hobbit.{name}"' in page
    assert 'href="llama_cpp/llama.html#Llama.create_chat_completion"' in page
