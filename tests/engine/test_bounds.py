# SPDX-License-Identifier: MIT
"""Bounds of a container: its memory and its cores, in every verb."""

import json
import os
import re
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import limits
import pytest
from servers import free_port, running

from bench.harness.system import Cgroup, NoCgroupError, memory_cgroup, remove_cgroup

pytestmark = pytest.mark.model

_MIB = 1 << 20
_LIMIT = 700 * _MIB
_ABOVE = "900M"
_PYHOBBIT = (sys.executable, "-P", "-m", "pyhobbit")
_HOBBIT = """
import sys
from pyhobbit import Engine, EngineConfig, CacheConfig, Hobbit
memory = 900 << 20
cases = {
    "Hobbit": lambda path: Hobbit(path, verbose=False, n_ctx=256, memory="900M"),
    "Engine": lambda path: Engine(path, EngineConfig(CacheConfig(memory=memory), n_ctx=256)).open(),
}
cases[sys.argv[1]](sys.argv[2])
"""
_AVAILABLE = """
import sys
from pathlib import Path
from pyhobbit.native.machine import available_memory
print(available_memory())
for _ in range(3):
    Path(sys.argv[1]).read_bytes()
print(available_memory())
"""
_THREADS = """
import sys
from pyhobbit import Hobbit
print(Hobbit(sys.argv[1], verbose=False, n_ctx=256, pools="4M").info().n_threads)
"""


@pytest.fixture(scope="module")
def container() -> Iterator[Cgroup]:
    """A memory cgroup, as a container has one."""
    try:
        with memory_cgroup(_LIMIT) as cgroup:
            yield cgroup
    except NoCgroupError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize(
    "verb",
    ["chat", "serve", "serve a folder", "inspect", "config", "bench", "MODEL.toml", "Hobbit", "Engine"],
)
def test_a_limit_above_the_containers_is_refused(
    container: Cgroup, tiny_gguf: Path, tmp_path: Path, verb: str
) -> None:
    model = tmp_path / "tiny.gguf"
    model.symlink_to(tiny_gguf)
    if verb == "MODEL.toml":
        (tmp_path / "tiny.toml").write_text(f'memory = "{_ABOVE}"\n')
    commands = {
        "chat": ["chat", model, "-p", "x", "--memory", _ABOVE],
        "serve": ["serve", model, "--port", free_port(), "--memory", _ABOVE],
        "serve a folder": ["serve", "--models-dir", tmp_path, "--port", free_port(), "--memory", _ABOVE],
        "MODEL.toml": ["chat", model, "-p", "x"],
        **{each: [each, model, "--memory", _ABOVE] for each in ("inspect", "config", "bench")},
    }
    python = (sys.executable, "-P", "-c", _HOBBIT, verb, model)
    command = (*_PYHOBBIT, *commands[verb]) if verb in commands else python
    done = limits.run(command, container.procs)
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert "a limit of 900.0 MiB is above the 700.0 MiB that this machine, or the memory cgroup, has" in said
    assert verb not in commands or said.startswith("pyhobbit: error: ")


def test_page_cache_is_free_memory(container: Cgroup, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(300 * _MIB))
    done = limits.run((sys.executable, "-P", "-c", _AVAILABLE, file), container.procs)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert after > before - 64 * _MIB


#
# cores
#


@contextmanager
def _one_core(kind: str) -> Iterator[list[str]]:
    """The begin of a command that may use one core."""
    if kind == "affinity":
        yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
        return
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    group = (root if v2 else root / "cpu") / f"hobbit-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        if v2:
            (group / "cpu.max").write_text("100000 100000")
        else:
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("100000")
    except OSError as e:
        pytest.skip(f"no CPU cgroup can be made: {e}")
    try:
        yield ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    finally:
        remove_cgroup(group)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
@pytest.mark.parametrize("kind", ["affinity", "quota"])
def test_one_core_gets_one_thread(tiny_gguf: Path, tmp_path: Path, kind: str) -> None:
    with _one_core(kind) as begin:

        def run(*arguments: object) -> str:
            done = limits.run([*begin, *map(str, arguments)])
            assert done.returncode == 0, done.stderr
            return done.stdout + done.stderr

        small = ("--pools", "4M", "--ctx", 256)
        bench = run(*_PYHOBBIT, "bench", tiny_gguf, "--prompts", 8, "-n", 2, "--json", *small)
        assert json.loads(bench[bench.index("{") : bench.rindex("}") + 1])["n_threads"] == 1
        assert "with 1 threads" in run(*_PYHOBBIT, "inspect", tiny_gguf, *small)
        assert re.search(r"^ +threads +1 ", run(*_PYHOBBIT, "config", tiny_gguf, *small), re.MULTILINE)
        assert run(sys.executable, "-P", "-c", _THREADS, tiny_gguf).split()[-1] == "1"
        assert re.search(r"default: all cores,\s+1\b", run(*_PYHOBBIT, "convert", "--help-all"))
        command = [*begin, *_PYHOBBIT, "serve", tiny_gguf, "--pools", "4M", "--ctx-size", 512]
        with running(command, tmp_path / "log") as server:
            told = Path(f"/proc/{server.process.pid}/environ").read_text().split("\0")
            assert "LLAMA_ARG_THREADS=1" in told
