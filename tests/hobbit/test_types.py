# SPDX-License-Identifier: MIT
"""Results of type checkers for Hobbit."""

import re
import subprocess
import sys
from pathlib import Path

import models
import pytest

STREAM = """
for chunk in Hobbit("m.gguf")("import os", max_tokens=16, stream=True):
    print(chunk["choices"][0]["text"])
reply = Hobbit("m.gguf").create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=16)
print(reply["choices"][0]["message"]["content"])
"""
# packages whose types nothing of the example has: with them it takes ten times as long
OTHERS = "gguf.*,huggingface_hub.*,jinja2.*,numpy.*,requests.*,tqdm.*,yaml.*"


@pytest.mark.slow
def test_the_example_of_the_readme_is_well_typed(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (models.ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "example.py").write_text(example + STREAM, "utf-8")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{OTHERS}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "Success: no issues found in 1 source file\n", done.stdout + done.stderr
