# SPDX-License-Identifier: MIT
"""A limit that is too small: each verb names the same least memory, and it works."""

import re
from pathlib import Path

import pytest
from conftest import RunPyhobbit
from hobbits import run_script

_LEAST = r"a memory budget of \S+ MiB is too small: the smallest that works is (\d+) MiB"
_HOBBIT = """
import sys
from pyhobbit import Hobbit, HobbitError
try:
    Hobbit(sys.argv[1], memory="30M", n_ctx=256)
except HobbitError as e:
    print(e)
"""

_SERVER = """
import sys
from argparse import Namespace
from pathlib import Path
from pyhobbit.cli import serve
from pyhobbit.errors import HobbitError
from pyhobbit.settings.config import CacheConfig
cache, flags = CacheConfig(memory=int(sys.argv[2]) << 20), ["--ctx-size", "256", "--parallel", "1"]
try:
    serve._check_memory(Path(sys.argv[1]), cache, Namespace(batch=None, passed_on=flags))
    print("fits")
except HobbitError as e:
    print(e)
"""


def _named(text: str) -> int:
    found = re.search(_LEAST, text)
    assert found, text
    return int(found[1])


@pytest.mark.slow
def test_it_is_the_same_everywhere(tiny_gguf: Path, run_pyhobbit: RunPyhobbit) -> None:
    verbs = (["config"], ["inspect", "--no-speed"], ["inspect"], ["chat", "-p", "x"], ["bench"])
    given = (tiny_gguf, "--memory", "30M", "--ctx", 256)
    named = {_named(run_pyhobbit(*verb, *given).stderr) for verb in verbs}
    assert named == {_named(run_script(_HOBBIT, tiny_gguf))}


@pytest.mark.slow
def test_a_server_needs_less_for_itself(tiny_gguf: Path) -> None:
    least = _named(run_script(_SERVER, tiny_gguf, 20))
    assert run_script(_SERVER, tiny_gguf, least) == "fits\n"
    assert least < _named(run_script(_HOBBIT, tiny_gguf))
