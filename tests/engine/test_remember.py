# SPDX-License-Identifier: MIT
"""Counts of uses that a model keeps from run to run: what they change at a start, and what they never do."""

import shutil
import time
from pathlib import Path

import pytest
from conftest import RunPyhobbit
from gguf import GGUFReader
from hobbits import open_model, text_of

from pyhobbit.engine.engine import Engine
from pyhobbit.engine.plan import lay_out
from pyhobbit.model.file_names import uses_path
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

pytestmark = pytest.mark.model

POOLS = 6 << 20  # a third of the experts' 18 MiB
PROMPT = "def read_file(path):\n"
N_TOKENS = 12
DEADLINE_S = 60


@pytest.fixture
def model(tiny_gguf: Path, tmp_path: Path) -> Path:
    """In a folder of its own: counts lie beside it."""
    path = tmp_path / "tiny.gguf"
    path.symlink_to(tiny_gguf)
    return path


def _config(remember: bool | None) -> EngineConfig:
    return EngineConfig(CacheConfig(pools=POOLS, prefetch=0, remember=remember), n_ctx=256)


def _answer(engine: Engine) -> str:
    return "".join(piece.text for piece in engine.generate(PROMPT, N_TOKENS, SamplingConfig(temp=0)))


def _run(model: Path, remember: bool | None = True) -> tuple[str, int]:
    """The answer of a run of its own, and the bytes that were read before the prompt."""
    with Engine(model, _config(remember)) as engine:
        end, n_bytes = time.monotonic() + DEADLINE_S, -1
        while engine.stats().cache.bytes_read != n_bytes and time.monotonic() < end:
            n_bytes = engine.stats().cache.bytes_read
            time.sleep(0.3)
        return _answer(engine), n_bytes


def _uses(model: Path) -> list[int]:
    return GGUFReader(uses_path(model)).fields["hobbit.expert_uses"].contents()


def test_a_second_start_has_read_what_the_first_run_used(model: Path) -> None:
    first, before = _run(model)
    assert before == 0
    uses = _uses(model)
    assert uses_path(model).stat().st_size < 4096
    second, before = _run(model)
    assert second == first
    assert 0 < before <= POOLS
    assert _uses(model) == [2 * n for n in uses]  # the same tokens again


def test_nothing_is_kept_unless_asked(model: Path) -> None:
    text, _ = _run(model, None)
    assert not uses_path(model).exists()
    assert _run(model, False) == (text, 0)
    assert not uses_path(model).exists()


def test_a_run_without_tokens_leaves_no_counts(model: Path) -> None:
    with Engine(model, _config(True)):
        pass
    assert not uses_path(model).exists()


def test_a_plan_neither_reads_nor_leaves_counts(model: Path) -> None:
    text, _ = _run(model)
    kept = uses_path(model).read_bytes()
    plan = lay_out(model, _config(True))
    assert plan.pools <= POOLS
    assert uses_path(model).read_bytes() == kept
    assert _run(model)[0] == text


@pytest.mark.parametrize("damage", [b"", b"GGUF", b"something else"])
def test_a_file_that_holds_no_counts_is_replaced(model: Path, damage: bytes) -> None:
    text, _ = _run(model)
    uses = _uses(model)
    uses_path(model).write_bytes(damage)
    assert _run(model) == (text, 0)
    assert _uses(model) == uses


def test_counts_of_another_model_are_replaced(model: Path) -> None:
    text, _ = _run(model)
    uses, other = _uses(model), model.with_name("other.gguf")
    shutil.copyfile(model, other)
    with other.open("ab") as file:
        file.write(bytes(64))  # another size
    shutil.copyfile(uses_path(model), uses_path(other))
    assert _run(other) == (text, 0)
    assert _uses(other) == uses


def test_counts_that_cannot_be_written_are_no_error(model: Path, run_pyhobbit: RunPyhobbit) -> None:
    uses_path(model).mkdir()
    arguments = ("-p", PROMPT, "-n", N_TOKENS, "--temp", 0, "--pools", "6M", "--remember", "--verbose")
    done = run_pyhobbit("chat", model, *arguments)
    assert done.returncode == 0
    for part in ("it is ignored, and replaced when the model is closed", "the next start will not know"):
        assert sum(part in line for line in done.stderr.splitlines()) == 1, done.stderr
    assert uses_path(model).is_dir()


def test_chat_keeps_counts_where_asked(model: Path, run_pyhobbit: RunPyhobbit) -> None:
    chat = ("chat", model, "-p", PROMPT, "-n", 4, "--pools", "6M", "--quiet")
    assert run_pyhobbit(*chat).returncode == 0
    assert not uses_path(model).exists()
    assert run_pyhobbit(*chat, "--remember").returncode == 0
    assert sum(_uses(model)) > 0


def test_hobbit_keeps_counts_where_asked(model: Path) -> None:
    with open_model(model) as hobbit:
        text = text_of(hobbit)
    assert not uses_path(model).exists()
    with open_model(model, remember=True) as hobbit:
        assert text_of(hobbit) == text
    assert sum(_uses(model)) > 0


def test_remembering_alone_asks_for_no_cache() -> None:
    assert CacheConfig(remember=True).settings() == {"hobbit.remember": True}
    assert CacheConfig(pools=5, remember=True).settings() == {
        "hobbit.enable": True,
        "hobbit.pools": 5,
        "hobbit.remember": True,
    }
