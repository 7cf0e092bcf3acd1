# SPDX-License-Identifier: MIT
"""Requests that ask to be computed alone: the bits that they get from a server that nobody else asks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import architecture_file
import models
import pytest
from servers import LONG, PROMPT, Server, serving, streaming, wait_until

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not models.stock_dir().exists(), reason="needs make stock"),
]

_SLOTS = 8
_ALONE = {"hobbit": {"alone": True}}
# the lengths of some are just beyond a pass
_LENGTHS = (3, 90, 17, 129, 64, 260, 300, 31)

Found = tuple[list[int], list[float]]  # tokens of the answer, and log probabilities at each


@pytest.fixture(scope="module", params=["tiny", "qwen3next", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model; random ones with states and with windows."""
    if request.param == "tiny":
        return models.tiny()
    path = tmp_path_factory.mktemp("alone") / "m.gguf"
    return architecture_file.write(request.param, path, context_length=2048)


def _ask(server: Server, number: int, **options: object) -> Found:
    prompt = [3 + (i * 7919 + number * 31) % 250 for i in range(_LENGTHS[number])]
    body = {"prompt": prompt, "n_predict": 24, "n_probs": 4, "temperature": 0, "ignore_eos": True}
    answer = server.request("/completion", {**body, **options})
    assert answer.status == 200, answer.text
    places: list[Any] = answer.json["completion_probabilities"]
    values = [top["logprob"] for place in places for top in place["top_logprobs"]]
    return [place["id"] for place in places], values


def _at_once(server: Server, **options: object) -> list[Found]:
    with ThreadPoolExecutor(_SLOTS) as pool:
        return list(pool.map(lambda number: _ask(server, number, **options), range(_SLOTS)))


def test_eight_clients_get_what_each_gets_alone(model: Path, tmp_path: Path) -> None:
    size = ("--parallel", _SLOTS, "--ctx-size", 512 * _SLOTS, "--batch", 128)
    pools = models.routed_expert_bytes(model) // 2
    with serving(model, tmp_path / "log", "--pools", pools, *size) as server:
        alone = [_ask(server, number, cache_prompt=False) for number in range(_SLOTS)]
        together = _at_once(server)
        assert _at_once(server, **_ALONE) == alone
        assert _at_once(server, **_ALONE) == alone  # kept prompts are computed again
        assert together != alone  # in stock as well
        with ThreadPoolExecutor(_SLOTS) as pool:  # beside some that share their passes
            found = pool.map(lambda n: _ask(server, n, **(_ALONE if n % 2 else {})), range(_SLOTS))
        assert list(found)[1::2] == alone[1::2]


def test_others_go_on_beside_one_that_is_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "4M", "--parallel", 3, *LONG)
    with serving(tiny_gguf, tmp_path / "log", *options) as server, streaming(server, **_ALONE):
        assert server.complete(n=8)
        assert server.complete(n=8, **_ALONE)
        assert server.busy_slots() == 1
        before = server.cache()["layers_computed"]
        wait_until(lambda: server.cache()["layers_computed"] > before)  # it goes on, too


def test_alone_holds_on_a_server_that_drafts(tiny_gguf: Path, tmp_path: Path) -> None:
    size = ("--parallel", _SLOTS, "--ctx-size", 512 * _SLOTS, "--batch", 128)
    drafts = (
        "--spec-type",
        "draft-simple,ngram-mod",
        "--spec-draft-model",
        tiny_gguf,
        "--spec-draft-n-max",
        3,
    )
    with serving(tiny_gguf, tmp_path / "none", "--pools", "4M", *size) as server:
        alone = [_ask(server, number, cache_prompt=False) for number in range(_SLOTS)]
    with serving(tiny_gguf, tmp_path / "log", "--pools", "4M", *size, *drafts) as server:
        with ThreadPoolExecutor(_SLOTS) as pool:  # beside some that draft
            found = list(pool.map(lambda n: _ask(server, n, **(_ALONE if n % 2 else {})), range(_SLOTS)))
        assert found[1::2] == alone[1::2]
        timings = [
            server.request("/completion", {"prompt": PROMPT, "n_predict": 24, "temperature": 0, **how})
            for how in ({}, _ALONE)
        ]
        assert ["draft_n" in answer.json["timings"] for answer in timings] == [True, False]


def test_slots_that_share_a_context_cannot_compute_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "4M") as server:
        answer = server.request("/completion", {"prompt": "x", "n_predict": 1, **_ALONE})
        assert answer.status == 400
        assert "start the server with --no-kv-unified" in answer.error
        wrong = server.request("/completion", {"prompt": "x", "hobbit": {"alone": 1}})
        assert (wrong.status, "alone must be true or false" in wrong.error) == (400, True)
