# SPDX-License-Identifier: MIT
"""`serve --keep-slots` keeps what slots hold while it is stopped, unless anything has changed."""

from pathlib import Path
from typing import Any

import models
import pytest
from conftest import RunPyhobbit
from servers import END_TIMEOUT_S, LONG, PROMPT, Server, serving, streaming, wait_until

TALK = PROMPT * 12
OPTIONS = ("--pools", "5M", "--ctx-size", 1024, "--parallel", 2, "--no-kv-unified")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(models.tiny().read_bytes())
    return path


def _ask(server: Server, prompt: str) -> tuple[str, Any, dict[str, int]]:
    """Text, probabilities and what was read of a greedy answer."""
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "n_probs": 5, "cache_prompt": True}
    answer = server.request("/completion", body).json
    return answer["content"], answer["completion_probabilities"], answer["timings"]


def _end(server: Server) -> None:
    server.process.terminate()
    assert server.process.wait(END_TIMEOUT_S) == 0


def _kept(model: Path) -> list[Path]:
    return sorted(model.parent.glob("*.slots-*"))


@pytest.mark.parametrize("options", [OPTIONS, ("--pools", "5M", "--ctx-size", 1024)], ids=["own", "shared"])
def test_a_conversation_goes_on_after_a_restart(
    model: Path, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    with serving(model, tmp_path / "m.log", *options) as server:  # without a restart
        first = _ask(server, TALK)
        expected = _ask(server, TALK + first[0] + "\n")
    with serving(model, tmp_path / "m.log", *options, "--keep-slots", "64M") as server:
        assert _ask(server, TALK)[:2] == first[:2]
        _end(server)
    (file,) = _kept(model)
    assert file.stat().st_mode & 0o77 == 0
    with serving(model, tmp_path / "m.log", *options, "--keep-slots", "64M") as server:
        assert _ask(server, "class A:\n    x = 1\n" * 8)[2]["cache_n"] == 0  # takes the slot that is free
        found = _ask(server, TALK + first[0] + "\n")
        assert found[:2] == expected[:2]
        assert found[2]["cache_n"] == expected[2]["cache_n"] > 50
        _end(server)
    assert len(_kept(model)) == 2


@pytest.mark.parametrize("n_predict", [0, 20_000], ids=["reading", "writing"])
def test_what_is_interrupted_is_kept_as_far_as_it_was_computed(
    model: Path, tmp_path: Path, n_predict: int
) -> None:
    prompt = TALK if n_predict else PROMPT * 3000
    plain = (*OPTIONS[:2], *LONG)
    kept = (*plain, "--keep-slots", "64M")
    with serving(model, tmp_path / "log", *plain) as server:
        with streaming(server, prompt=prompt, n_predict=n_predict, return_progress=True) as answer:
            assert all(answer.readline() for _ in range(8))
        wait_until(lambda: server.busy_slots() == 0)  # its client has left
        expected = _ask(server, TALK)
    with (
        serving(model, tmp_path / "log", *kept) as server,
        streaming(server, prompt=prompt, n_predict=n_predict, return_progress=True) as answer,
    ):
        assert all(answer.readline() for _ in range(8))
        _end(server)
    assert len(_kept(model)) == 1
    with serving(model, tmp_path / "log", *kept) as server:
        found = _ask(server, TALK)
        assert found[:2] == expected[:2]
        assert found[2]["cache_n"] == expected[2]["cache_n"] > 50


def test_a_damaged_file_and_a_foreign_one_are_refused(model: Path, tmp_path: Path) -> None:
    options = (*OPTIONS, "--keep-slots", "64M")
    with serving(model, tmp_path / "log", *options) as server:
        expected = _ask(server, TALK)
        _ask(server, "class A:\n    x = 1\n" * 8)
        _end(server)
    first, second = (each.read_bytes() for each in _kept(model))
    middle = len(first) // 2
    damaged = first[:middle] + bytes([first[middle] ^ 1]) + first[middle + 1 :]
    for one, other in ((damaged, b""), (first[:-100], second[:9]), (second, first)):
        for path, content in zip(_kept(model), (one, other), strict=True):
            path.write_bytes(content)
        with serving(model, tmp_path / "log", *options) as server:
            found = _ask(server, TALK)
            assert server.log.read_text().count("is damaged, so its conversation is read again") == 2
            assert found[:2] == expected[:2]
            assert found[2]["cache_n"] == 0
            _ask(server, "class A:\n    x = 1\n" * 8)
            _end(server)


def test_files_keep_to_their_size_and_to_what_they_come_from(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", *OPTIONS, "--keep-slots", "300K") as server:
        _ask(server, TALK)
        _ask(server, "x")  # used last, and small
        _end(server)
    (file,) = _kept(model)
    assert file.stat().st_size <= 300 << 10
    others = (("--cache-type-k", "q8_0"), ("--prefetch", 0), ("--rope-scale", 2))
    for options in others:
        with serving(model, tmp_path / "log", *OPTIONS, "--keep-slots", "300K", *options) as server:
            assert _kept(model) == []
            assert _ask(server, "x")[2]["cache_n"] == 0
            _end(server)
        assert len(_kept(model)) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--keep-slots", "much"), "much"),
        (("--keep-slots", "1M", "--spec-type", "ngram-mod"), "no state beside --rpc or --spec-type"),
        (("--keep-slots", "1M", "--models-dir", "."), "one model, or a folder"),
    ],
)
def test_it_refuses_what_it_cannot_keep(
    model: Path, run_pyhobbit: RunPyhobbit, options: tuple[str, ...], said: str
) -> None:
    done = run_pyhobbit("serve", model, *options)
    assert done.returncode == 2
    assert said in done.stderr
