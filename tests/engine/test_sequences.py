# SPDX-License-Identifier: MIT
"""Records of use belong to a sequence: a new one starts afresh, parallel ones keep their own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import logits
import models
import pytest
from servers import serving
from traces import turn_lengths

from pyhobbit.engine.engine import Engine
from pyhobbit.routing.trace import Simulation, read_trace, simulate
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig

pytestmark = pytest.mark.model

PROMPTS = ("def read_file(path):", "class Node:\n    def __init__(self, value):")


def test_a_second_prompt_does_not_inherit_the_records_of_the_first(tiny_gguf: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "t.csv"
    cache = CacheConfig(pools=4 << 20, t1=1.0, policy="hobbit", prefetch=0, trace=trace_file)
    decode_misses = 0
    with Engine(tiny_gguf, EngineConfig(cache=cache)) as engine:
        for prompt in PROMPTS:
            pieces = engine.generate(prompt, 48, SamplingConfig(temp=0))
            next(pieces)
            decode_misses -= engine.stats().cache.misses_high
            assert sum(1 for _ in pieces) == 47
            decode_misses += engine.stats().cache.misses_high
        info = engine.info()
    trace = read_trace(trace_file)
    assert len(turn_lengths(trace)) == 2
    shape = (info.n_layers, info.n_experts, info.n_experts_used)
    replay = Simulation(*shape, info.pool_slots_high, policy="hobbit", floors=True)
    assert simulate(trace.routes, replay).misses_high == decode_misses

    as_one = trace.routes.copy()
    as_one["token"] += as_one["sequence"] * (as_one["token"].max() + 1)
    as_one["sequence"] = 0
    assert simulate(as_one, replay).misses_high != decode_misses, "this text would not show inherited records"


def test_a_prompt_that_continues_the_last_one_keeps_its_sequence(tiny_gguf: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "t.csv"
    cache = CacheConfig(pools=4 << 20, trace=trace_file)
    with Engine(tiny_gguf, EngineConfig(cache=cache)) as engine:
        answer = "".join(p.text for p in engine.generate(PROMPTS[0], 8, SamplingConfig(temp=0)))
        list(engine.generate(PROMPTS[0] + answer + "\n    return x\n", 8, SamplingConfig(temp=0)))
    assert len(turn_lengths(read_trace(trace_file))) == 1


def test_sequences_decoded_side_by_side_are_recorded_apart(tmp_path: Path) -> None:
    trace_file = tmp_path / "t.csv"
    prompts = [[(20 + token, token, s) for token in range(5 + s)] for s in range(3)]
    steps = [[(40 + n + s, 5 + s + n, s) for s in range(3)] for n in range(7)]
    settings: dict[str, logits.Override] = {"hobbit.pools": 4 << 20, "hobbit.trace": str(trace_file)}
    logits.run(models.lib_dir(), models.tiny(), {"side by side": logits.Plan([*prompts, *steps])}, settings)
    trace = read_trace(trace_file)
    assert turn_lengths(trace) == [12, 13, 14]
    assert trace.n_decoded == 21


def test_every_request_of_the_server_is_a_sequence_of_its_own(tiny_gguf: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "t.csv"
    settings = f"hobbit.pools=int:4000000,hobbit.trace=str:{trace_file}"
    with serving(tiny_gguf, tmp_path / "log", "--override-kv", settings, "-np", "2") as server:
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda prompt: server.complete(prompt, cache_prompt=True), PROMPTS))
        again = server.complete(PROMPTS[0], cache_prompt=True)  # its prompt is still in a slot's KV cache
    assert all(together)
    assert again
    n_warm_up = 2  # tokens of what the server computes before it is ready
    assert sum(n > n_warm_up for n in turn_lengths(read_trace(trace_file))) == 3
