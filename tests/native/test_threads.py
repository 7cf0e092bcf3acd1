# SPDX-License-Identifier: MIT
"""How many threads compute: the affinity, and CPU quotas of cgroups of either version."""

import os
from pathlib import Path

import pytest

from pyhobbit.convert.options import Options
from pyhobbit.native import programs, threads
from pyhobbit.settings.config import EngineConfig


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight cores without hardware threads."""
    monkeypatch.setattr(threads, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    return tmp_path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("quota", "parents", "n"),
    [
        ("max 100000", "max 100000", 8),
        ("300000 100000", "max 100000", 3),
        ("max 100000", "250000 100000", 2),  # rounded down
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "600000 100000", 6),
    ],
)
def test_version_2(root: Path, quota: str, parents: str, n: int) -> None:
    _write(root / "proc/self/cgroup", "0::/a/b\n")
    _write(root / "sys/fs/cgroup/a/b/cpu.max", quota)
    _write(root / "sys/fs/cgroup/a/cpu.max", parents)
    assert threads.processor_cores() == EngineConfig.computing_threads(None) == Options(Path()).threads == n
    assert EngineConfig.computing_threads(5) == 5


@pytest.mark.parametrize(("quota", "n"), [(-1, 8), (200_000, 4), (10_000, 1)])
def test_version_1(root: Path, quota: int, n: int) -> None:
    _write(root / "proc/self/cgroup", "4:memory:/m\n3:cpuset:/a\n2:cpu,cpuacct:/a/b\n0::/\nnonsense\n")
    _write(root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", f"{quota}\n")
    _write(root / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000\n")
    assert threads.processor_cores() == n


def test_a_container_sees_its_own_cgroup_as_the_root(root: Path) -> None:
    _write(root / "proc/self/cgroup", "0::/docker/1\n")
    _write(root / "sys/fs/cgroup/cpu.max", "100000 100000")
    assert threads.processor_cores() == 1


@pytest.mark.usefixtures("root")
def test_llama_cpps_programs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(os, "execve", lambda *call: told.append(call[2].get("LLAMA_ARG_THREADS")))
    programs.become(["llama-server"])
    programs.become(["llama-server", "--threads", "3"])
    monkeypatch.setenv("LLAMA_ARG_THREADS", "5")
    programs.become(["llama-server"])
    assert told == ["8", None, "5"]
