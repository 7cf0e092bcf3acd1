# SPDX-License-Identifier: MIT
"""The expert cache as a server's clients see it: counters, thresholds of a request, a failing disk."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import PROMPT, Server, serving


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("cache") / "log"
    options = ("--pools", "6M", "--t1", 0.6, "--t2", 0.95, "--prefetch", 0)
    with serving(tiny_gguf, log, "--parallel", 2, "--ctx-size", 1024, *options) as server:
        yield server


def test_counters_are_valid_prometheus_text(server: Server) -> None:
    server.complete()
    answer = server.request("/metrics")
    families = list(text_string_to_metric_families(answer.text))
    ours = [family for family in families if family.name.startswith("hobbit_")]
    assert len(ours) > 20
    assert len({family.name for family in families}) == len(families)
    for family in ours:
        assert family.documentation
        assert family.type in ("counter", "gauge")
        assert all(sample.name.endswith("_total") for sample in family.samples if family.type == "counter")


def test_json_and_prometheus_agree(server: Server) -> None:
    server.complete()
    cache = server.cache()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.request("/metrics").text)
        for sample in family.samples
    }
    for key, name in {
        "selections_low": ("hobbit_selections_total", "low"),
        "selections_skipped": ("hobbit_selections_total", "skipped"),
        "hits_high": ("hobbit_hits_total", "high"),
        "misses_high": ("hobbit_misses_total", "high"),
        "bytes_read": ("hobbit_read_bytes_total",),
        "compute_s": ("hobbit_compute_seconds_total",),
        "pool_slots_low": ("hobbit_pool_slots", "low"),
        "t1": ("hobbit_threshold", "t1"),
    }.items():
        assert cache[key] > 0
        assert math.isclose(values[name], cache[key]), key


def test_a_request_brings_its_own_thresholds(server: Server) -> None:
    def shares(**options: object) -> tuple[str, dict[str, int]]:
        before = server.cache()
        text = server.complete(**options)
        after = server.cache()
        return text, {
            k: after[f"selections_{k}"] - before[f"selections_{k}"] for k in ("high", "low", "skipped")
        }

    _, usual = shares()
    assert usual["low"] > 0

    high_text, high = shares(hobbit={"t1": 1})
    assert high["low"] == high["skipped"] == 0
    assert high_text == server.complete(hobbit={"t1": 1, "t2": 1})

    # of a token's two experts the second is skipped, unless another token of the prompt asks for it
    _, first_alone = shares(hobbit={"t2": 0})
    assert first_alone["skipped"] > usual["skipped"]

    _, again = shares()
    assert again["skipped"] < first_alone["skipped"]
    assert again["low"] > 0
    assert server.cache()["t1"] == 0.6


def test_thresholds_of_parallel_requests_do_not_mix(server: Server) -> None:
    """A request that wants everything high gets it beside one that wants next to nothing."""
    alone = server.complete(n=24, hobbit={"t1": 1})
    with ThreadPoolExecutor(2) as pool:
        frugal = pool.submit(server.complete, "class Node:\n", 200, hobbit={"t2": 0})
        texts = [server.complete(n=24, hobbit={"t1": 1}) for _ in range(3)]
        frugal.result()
    assert texts == [alone] * 3


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("hobbit", "problem"),
    [
        ({"t1": -0.1}, "between 0 and 1"),
        ({"t2": 1.5}, "between 0 and 1"),
        ({"t1": 0.9, "t2": 0.5}, "t1 must not be above t2"),
        ({"t1": "high"}, "t1 must be a number"),
        ({"t3": 0.5}, "has no 't3'"),
        (0.5, "must be an object"),
    ],
)
def test_wrong_thresholds_are_bad_requests(server: Server, path: str, hobbit: object, problem: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    body = {"prompt": PROMPT, "messages": messages, "max_tokens": 4, "hobbit": hobbit}
    answer = server.request(path, body)
    assert answer.status == 400
    assert problem in answer.error


def test_thresholds_need_a_low_pool(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M") as server:
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "hobbit": {"t1": 0.5}}
        answer = server.request("/v1/completions", body)
        assert answer.status == 400
        assert "opened without a pool" in answer.error
        assert server.complete(hobbit={"t1": 1}) == server.complete()


def test_a_model_without_cache_says_so(tmp_path: Path) -> None:
    dense = tmp_path / "dense.gguf"
    models.write_dense_llama(dense)
    with serving(dense, tmp_path / "log", "--ctx-size", 128) as server:
        assert server.cache() == {"cached": False}
        assert "hobbit_" not in server.request("/metrics").text
        answer = server.request("/completion", {"prompt": "a", "n_predict": 1, "hobbit": {"t1": 0.5}})
        assert answer.status == 400
        assert "without an expert cache" in answer.error


def test_a_failed_disk_fails_requests_and_health(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    model.write_bytes(models.tiny().read_bytes())
    with serving(model, tmp_path / "log", "--pools", "3M", "--prefetch", 0) as server:
        server.complete()
        with model.open("r+b") as file:
            file.truncate(model.stat().st_size // 2)
        answer = server.request("/completion", {"prompt": "class Other:\n" * 8, "n_predict": 32})
        assert answer.status == 500
        assert str(model) in answer.error
        health = server.request("/health")
        assert health.status == 503
        assert health.error == answer.error
        assert server.request("/completion", {"prompt": PROMPT, "n_predict": 1}).status == 500
