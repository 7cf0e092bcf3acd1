# SPDX-License-Identifier: MIT
"""The expert cache as a server's clients see it: counters, thresholds of a request, a failing disk."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
from conftest import RunPyhobbit
from prometheus_client.parser import text_string_to_metric_families
from servers import LONG, PROMPT, Server, serving, streaming

from pyhobbit._tables import COUNTERS
from pyhobbit.cli import bench
from pyhobbit.engine.engine import Engine
from pyhobbit.quality.calibration import calibrate
from pyhobbit.settings.config import CacheConfig, CalibrationConfig, EngineConfig

TESTS = Path(__file__).resolve().parent.parent
BY_REQUEST = ("selections_high", "selections_low", "selections_skipped", "prefetched_used")
SAME = 5e-3  # difference of log probabilities, whatever batch they are computed in


@pytest.fixture(scope="module")
def server(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("cache") / "log"
    options = ("--pools", "6M", "--set", "t1=0.6", "--set", "t2=0.95", "--prefetch", 0)
    with serving(tiny_gguf, log, "--parallel", 2, *LONG, *options) as server:
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


def _metrics(server: Server) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(server.request("/metrics").text)
        for sample in family.samples
    }


def test_json_and_prometheus_agree(server: Server) -> None:
    server.complete()
    cache = server.cache()
    values = _metrics(server)
    for key, name in {
        "pool_slots_low": ("hobbit_pool_slots", "low"),
        "t1": ("hobbit_threshold", "t1"),
    }.items():
        assert cache[key] > 0
        assert math.isclose(values[name], cache[key]), key
    for each in COUNTERS:
        metric = (f"hobbit_{each.metric}", *re.findall('"(.*)"', each.label or ""))
        assert math.isclose(values[metric], cache[each.name]), each
    for key in ("hits", "misses"):
        assert len(cache[f"{key}_by_layer"]) == cache["n_layers"]
        assert all(cache[f"{key}_by_layer"])
        assert sum(cache[f"{key}_by_layer"]) == cache[f"{key}_high"] + cache[f"{key}_low"]


def test_all_that_tell_of_a_run_tell_the_same(
    tiny_gguf: Path, tmp_path: Path, run_pyhobbit: RunPyhobbit
) -> None:
    """Each computes one prompt of bench by itself; what has one name in two of them is one figure."""
    settings = CacheConfig(pools=64 << 20, prefetch=0, quality="lossless")
    options = ("--pools", "64M", "--prefetch", 0, "--quality", "lossless", "--batch", 512)
    with Engine(tiny_gguf, EngineConfig(settings, n_ctx=512, n_batch=512)) as engine:
        text = bench._cut(engine, next(bench._texts()), 16)
        list(engine.generate(text, 1))
        stats = engine.stats().as_dict()
    numbers = ("--ctx", 512, "--prompts", 16, "-n", 4, "--set", "warm_up=0")
    measured = json.loads(run_pyhobbit("bench", tiny_gguf, *options, *numbers, "--json").stdout)
    with serving(tiny_gguf, tmp_path / "log", "--parallel", 1, "--ctx-size", 512, *options) as server:
        before = server.cache()  # llama.cpp tries a context with a token
        server.complete(text, n=1)
        shown = json.loads(run_pyhobbit("top", server.url, "--once", "--json").stdout)
        told, metrics = server.cache(), _metrics(server)
    assert stats["bytes_read"] == measured["prompts"][0]["bytes_read"] > 0
    for each in COUNTERS:
        name = (f"hobbit_{each.metric}", *re.findall('"(.*)"', each.label or ""))
        assert told[each.name] == shown[each.name] == pytest.approx(metrics[name]), each
        if each.name.startswith(("selections", "layers")):
            assert told[each.name] - before[each.name] == stats[each.name], each
    uses = [sum(of[name] for name in ("hits_high", "misses_high")) for of in (told, before, stats)]
    assert uses[0] - uses[1] == uses[2] > 0
    assert told["rates"].keys() == shown["rates"].keys()
    alone = {"n_tokens", "tokens_per_second", "busy_cores", "barrier_share"}
    of_bench = {*measured["decoding"]} - alone
    assert of_bench < told["rates"].keys()
    assert "bytes_read_per_token" in of_bench & stats.keys()


@pytest.mark.parametrize("memory", ["64M", "68M"])
def test_the_pools_are_those_of_the_first_lines(tiny_gguf: Path, tmp_path: Path, memory: str) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--parallel", 1, "--memory", memory) as server:
        cache = server.cache()
        server.complete(n=4)
        assert server.peak() <= int(memory[:-1]) << 20
    told = re.search(r"experts +(?:high )?(\d+) of (\d+)", (tmp_path / "log").read_text())
    assert told
    assert (int(told[1]), int(told[2])) == (cache["pool_slots_high"], cache["n_all_experts"])


def test_counters_of_a_server_add_up(tiny_gguf: Path, tmp_path: Path) -> None:
    """Compares by name: both formats of the server come from one list."""
    options = ("--pools", "3M", "--prefetch", 0, "--parallel", 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        server.complete()
        cache = server.cache()
    misses = cache["misses_high"]
    assert cache["evictions"] == misses - cache["pool_slots_high"] > 0
    assert cache["reads"] >= misses
    assert cache["bytes_read"] >= misses * cache["tier_bytes_high"] / (cache["n_layers"] * cache["n_experts"])
    assert cache["selections_high"] >= cache["hits_high"] + misses
    assert cache["predicted"] == cache["prefetched"] == cache["selections_low"] == 0
    assert 0 < cache["stall_s"] <= cache["compute_s"]


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

    assert shares(hobbit={"quality": "lossless"}) == (high_text, high)
    _, fast = shares(hobbit={"quality": "fast"})
    assert fast["low"] > 0

    # a token's second expert is skipped, unless another token of the prompt asks for it
    _, first_alone = shares(hobbit={"t2": 0})
    assert first_alone["skipped"] > usual["skipped"]

    _, again = shares()
    assert again["skipped"] < first_alone["skipped"]
    assert again["low"] > 0
    assert server.cache()["t1"] == 0.6
    assert server.cache()["quality"] == ""


def test_thresholds_of_parallel_requests_do_not_mix(server: Server) -> None:
    """A request that wants everything high gets it beside one that wants next to nothing."""
    high, low = {"t1": 1}, {"t2": 0}
    alone, _ = server.logprobs(n=24, cache_prompt=False, hobbit=high)
    assert _distance(alone, server.logprobs(n=24, cache_prompt=False, hobbit=low)[0]) > 20 * SAME

    with streaming(server, prompt="class Node:\n", hobbit=low):
        for _ in range(3):
            each, _ = server.logprobs(n=24, cache_prompt=False, hobbit=high)
            assert _distance(each, alone) < SAME
        assert server.busy_slots() == 1, "the other answer ended before"


def test_a_requests_thresholds_hold_beside_prefetch(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "3M", "--set", "t1=0", "--set", "t2=1", "--prefetch", 2, "--parallel", 1)
    with serving(tiny_gguf, tmp_path / "log", *options) as server:
        before = server.cache()
        text = server.complete(hobbit={"t1": 1})
        done = {key: value - before[key] for key, value in server.cache().items() if key in BY_REQUEST}
        assert done["selections_high"] > 0
        assert done["selections_low"] == done["selections_skipped"] == 0
        assert done["prefetched_used"] > 0
        server.complete()
        assert server.cache()["selections_low"] > before["selections_low"]
        assert server.complete(hobbit={"t1": 1}) == text


def _distance(ours: list[float], others: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, others, strict=True))


def test_what_lower_thresholds_computed_is_not_reused(tiny_gguf: Path, tmp_path: Path) -> None:
    options = ("--pools", "6M", "--set", "t1=0.6", "--set", "t2=0.95", "--prefetch", 0, "--parallel", 1)
    prompt = PROMPT * 8
    with serving(tiny_gguf, tmp_path / "fresh", *options) as server:
        expected, n_prompt = server.logprobs(prompt, hobbit={"t1": 1})

    folder = tmp_path / "slots"
    folder.mkdir()
    files = ("--slot-save-path", f"{folder}/", "--cache-ram", 64)
    with serving(tiny_gguf, tmp_path / "log", *options, *files) as server:
        low, _ = server.logprobs(prompt, hobbit={"t2": 0})
        assert _distance(low, expected) > 20 * SAME
        refused = server.request("/slots/0?action=save", {"filename": "slot"})
        assert refused.status >= 400
        assert "below the server's" in refused.error
        assert server.logprobs(prompt, hobbit={"t2": 0})[1] < n_prompt  # reused

        # the slot's prompt in memory, then one that was put aside
        for others in ((), ("class Node:\n" * 20,)):
            server.logprobs(prompt, hobbit={"t2": 0}, cache_prompt=False)
            for other in others:
                server.logprobs(other, hobbit={"t2": 0})
            again, n_computed = server.logprobs(prompt, hobbit={"t1": 1})
            assert n_computed == n_prompt
            assert _distance(again, expected) < SAME

        assert server.logprobs(prompt, hobbit={"t1": 1})[1] < n_prompt
        assert server.logprobs(prompt)[1] < n_prompt  # asks for less than there is
        assert server.logprobs(prompt, hobbit={"t1": 1})[1] == n_prompt


def test_a_restored_slot_has_the_servers_thresholds(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    options = ("--pools", "6M", "--set", "t1=0.6", "--set", "t2=0.95", "--prefetch", 0, "--parallel", 1)
    prompt = PROMPT * 8
    with serving(tiny_gguf, tmp_path / "log", *options, "--slot-save-path", f"{folder}/") as server:
        _, n_prompt = server.logprobs(prompt)
        assert server.request("/slots/0?action=save", {"filename": "slot"}).status == 200

        def restore() -> None:
            server.logprobs("class Node:\n" * 20, hobbit={"t2": 0}, cache_prompt=False)
            assert server.request("/slots/0?action=restore", {"filename": "slot"}).status == 200

        restore()
        assert server.logprobs(prompt)[1] < n_prompt  # reused, whatever was computed in between
        restore()
        high, n_computed = server.logprobs(prompt, hobbit={"t1": 1})
        assert n_computed == n_prompt
        assert _distance(high, server.logprobs(prompt, hobbit={"t1": 1}, cache_prompt=False)[0]) < SAME


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("hobbit", "problem"),
    [
        ({"t1": -0.1}, "between 0 and 1"),
        ({"t2": 1.5}, "between 0 and 1"),
        ({"t1": 0.9, "t2": 0.5}, "hobbit.t1 (0.9) must not be above hobbit.t2 (0.5)"),
        ({"t1": "high"}, "t1 must be a number"),
        ({"t3": 0.5}, "has no 't3', only quality, price, t1, t2"),
        ({"quality": "quick"}, "quality is 'quick', and must be one of lossless small-loss fast"),
        ({"quality": 1}, "quality must be one of lossless small-loss fast"),
        (
            {"quality": "fast", "t1": 0.5},
            "hobbit.quality chooses the rule and its numbers, and hobbit.t1 is given",
        ),
        ({"price": -0.1}, "hobbit.price is -0.1: it must lie between 0 and"),
        ({"price": 0.5}, "runs by t1 and t2: restart with --set rule=price to use price"),
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
        assert "no memory was set aside for the low tier: restart with --set t1=" in answer.error
        assert server.complete(hobbit={"t1": 1}) == server.complete()


def test_a_request_brings_its_own_price(tmp_path: Path) -> None:
    """On a model whose calibration has costs."""
    model = tmp_path / "m.gguf"
    model.symlink_to(models.tiny_tiers("f16", "tq2_0"))
    text = TESTS / "tiny_moe/heldout.txt"
    config = CalibrationConfig(EngineConfig(n_ctx=64, n_threads=1), max_kl=0.05, max_chunks=4, rule="price")
    calibrate(model, text, config).calibration.write(model)
    with serving(model, tmp_path / "log", "--pools", "12M") as server:

        def shares(**options: object) -> dict[str, int]:
            before = server.cache()
            server.complete(cache_prompt=False, **options)
            after = server.cache()
            return {
                k: after[f"selections_{k}"] - before[f"selections_{k}"] for k in ("high", "low", "skipped")
            }

        assert server.cache()["price"] > 0
        metrics = server.request("/metrics").text
        assert '\nhobbit_threshold{name="price"} ' in metrics
        assert metrics.count("TYPE hobbit_threshold ") == 1
        high = shares(hobbit={"price": 0})
        assert (high["low"], high["skipped"]) == (0, 0)
        assert shares(model="m-exact") == high
        cheap = shares(hobbit={"price": 1e6})
        assert cheap["skipped"] > 0
        assert shares()["high"] > cheap["high"]
        body = {"prompt": PROMPT, "max_tokens": 4, "hobbit": {"t1": 0.5}}
        answer = server.request("/v1/completions", body)
        assert answer.status == 400
        assert "runs by price: restart with --set rule=gate to use t1 and t2" in answer.error


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
        assert health.error == answer.error.replace(f"{tmp_path}/", "")  # everybody may read it
        assert server.request("/completion", {"prompt": PROMPT, "n_predict": 1}).status == 500


def test_a_start_runs_no_warm_up(tiny_gguf: Path, tmp_path: Path) -> None:
    with serving(tiny_gguf, tmp_path / "log", "--pools", "6M") as server:
        # llama-server computes two tokens, to see what its memory can do; a warm-up would select all experts
        assert server.cache()["selections_high"] <= 2 * 6 * 2
