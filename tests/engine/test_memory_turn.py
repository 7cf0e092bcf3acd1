# SPDX-License-Identifier: MIT
"""Programs that take what is free open their models one after the other."""

import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import models
import pytest

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit
from pyhobbit.engine.plan import turn
from pyhobbit.native import machine
from pyhobbit.native.ffi import ffi, lib

pytestmark = pytest.mark.model

MEMINFO = Path("/proc/meminfo")


@pytest.fixture
def other() -> Iterator[IO[str]]:
    """Another program that has its turn: a second open file excludes even its own process."""
    with MEMINFO.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def can_take() -> bool:
    """True if this process has its turn, or could have it at once."""
    taken = lib.hobbit_take_turn(False)
    lib.hobbit_end_turn(taken)
    return taken != ffi.NULL


def has_turn() -> bool:
    """True if this process, and no other, has it."""
    with MEMINFO.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return can_take()
        return False


@pytest.mark.usefixtures("other")
def test_a_program_with_a_bound_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.time, "sleep", lambda _s: pytest.fail("it waits"))
    for cache in (CacheConfig(memory=1 << 30), CacheConfig(pools=1 << 20)):
        with turn(cache):
            assert not has_turn()


def test_one_without_a_bound_waits_for_the_other(other: IO[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def end_other(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(other, fcntl.LOCK_UN)

    monkeypatch.setattr(machine.time, "sleep", end_other)
    with turn(CacheConfig()):
        assert has_turn()
    assert waits


@pytest.mark.usefixtures("other")
@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_goes_on_when_the_other_does_not_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(machine.time, "sleep", lambda _s: now.append(now.pop() + 10))
    with turn(CacheConfig()):
        assert can_take()  # nor does the engine wait again
    assert now == [60]
    assert capsys.readouterr().err.count("waits for another program") == is_terminal


@pytest.mark.usefixtures("other")
def test_who_waits_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(n_ctx=64, cache=CacheConfig(prefetch=0))
    engine = Engine(models.tiny(), config)
    monkeypatch.setattr(machine.time, "sleep", lambda _s: engine.interrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.open()
    assert not can_take()


def test_an_engine_loads_within_its_turn() -> None:
    seen = []
    config = EngineConfig(n_ctx=64, cache=CacheConfig(prefetch=0))
    with Engine(models.tiny(), config, on_loading=lambda _share: seen.append(has_turn())):
        pass
    assert seen
    assert all(seen)


def test_a_hobbit_loads_within_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load: Any = Hobbit._load
    monkeypatch.setattr(Hobbit, "_load", lambda *args: (seen.append(has_turn()), load(*args))[1])
    with Hobbit(models.tiny(), n_ctx=64, verbose=False, prefetch=0):
        pass
    assert seen == [True]
