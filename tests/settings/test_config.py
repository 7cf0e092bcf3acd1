# SPDX-License-Identifier: MIT
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.quality.evaluate import evaluation_settings
from pyhobbit.settings.config import (
    CacheConfig,
    CalibrationConfig,
    ChatConfig,
    EngineConfig,
    SamplingConfig,
    format_size,
    parse_size,
)
from pyhobbit.settings.resolve import check_settings


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1B", 1),
        ("1000000", 1_000_000),
        ("2G", 2 << 30),
        ("2g", 2 << 30),
        ("512MiB", 512 << 20),
        ("512 MB", 512 << 20),
        ("1.5G", 3 << 29),
        (".5k", 512),
        ("1TiB", 1 << 40),
        (" 7B ", 7),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "G", "2X", "2GG", "-1G", "0", "0.0001", "1e9", "two", "1..5G", "2 G 3", "nan"]
)
def test_a_size_that_cannot_be_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="'8' is 8 bytes; for GiB write 8G"):
        parse_size("8")
    with pytest.raises(ConfigError, match="is not a size; write it like 2G"):
        parse_size(text)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_sizes_are_written_for_people(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


def test_without_settings_the_native_code_decides_everything() -> None:
    assert CacheConfig().settings() == {}


def test_settings_carry_their_native_keys_and_types() -> None:
    config = CacheConfig(memory=5, low_share=0.25, t1=0, t2=1.0, io_threads=3, sidecar=Path("/m/x.gguf"))
    settings = config.settings()
    assert settings == {
        "hobbit.enable": True,
        "hobbit.memory": 5,
        "hobbit.low_share": 0.25,
        "hobbit.t1": 0.0,
        "hobbit.t2": 1.0,
        "hobbit.io_threads": 3,
        "hobbit.sidecar": "/m/x.gguf",
    }
    # llama.cpp passes a setting on by its type: 0 instead of 0.0 would be an integer.
    assert isinstance(settings["hobbit.t1"], float)
    assert settings["hobbit.enable"] is True


def test_settings_of_eviction_prefetch_and_trace_carry_their_keys(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    config = CacheConfig(policy="hobbit", weights=(1, 0, 0, 0), prefetch=0, trace=trace)
    settings = config.settings()
    assert settings == {
        "hobbit.enable": True,
        "hobbit.policy": "hobbit",
        "hobbit.w_lru": 1.0,
        "hobbit.w_lfu": 0.0,
        "hobbit.w_lhu": 0.0,
        "hobbit.w_fld": 0.0,
        "hobbit.prefetch": 0,
        "hobbit.trace": str(trace),
    }
    assert isinstance(settings["hobbit.w_lru"], float)


def test_settings_of_the_device_carry_their_keys() -> None:
    assert CacheConfig(device="Vulkan0", device_memory=7, mode="gpu").settings() == {
        "hobbit.enable": True,
        "hobbit.device": "Vulkan0",
        "hobbit.device_memory": 7,
        "hobbit.mode": "gpu",
    }


def test_an_evaluation_leaves_nothing_to_a_calibration() -> None:
    settings = evaluation_settings(EngineConfig(cache=CacheConfig(policy="lfu")), "random")
    assert settings["hobbit.calibrated"] is False
    assert (settings["hobbit.t1"], settings["hobbit.t2"], settings["hobbit.prefetch"]) == (1.0, 1.0, 0)
    assert settings["hobbit.policy"] == "lfu"
    assert settings["hobbit.strict"] is True
    assert settings["hobbit.rule"] == "random"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_memory": 1, "pools": 1}, "hobbit.device_memory limits all that experts take"),
        ({"t1": 0.9, "t2": 0.5}, "hobbit.t1 (0.9) must not be above hobbit.t2 (0.5)"),
        ({"weights": (0.5, 0.5, 0.5, 0.0)}, "sum to 1.5: they must sum to 1"),
        ({"weights": (0.5, 0.25, 0.25 + 5e-6, 0)}, "they must sum to 1"),
        ({"weights": (1.0, 0.0, 0.0, 0.0), "policy": "lru"}, "belong to the policy 'hobbit'"),
        ({"price": 0.5, "t1": 0.5}, "hobbit.t1 and hobbit.t2 belong to the rule gate"),
        ({"price": 0.5, "t2": 0.5}, "hobbit.t1 and hobbit.t2 belong to the rule gate"),
        ({"price": 0.5, "rule": "gate"}, "hobbit.price belongs to the rule price"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_the_engine(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_settings(CacheConfig(**settings).settings())


def test_a_long_sidecar_path_is_passed_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 150)
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert CacheConfig(sidecar=folder / "x.gguf").settings()["hobbit.sidecar"] == "x.gguf"


def test_a_sidecar_path_that_llama_cpp_would_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="longer than 127 bytes; start pyhobbit in its folder"):
        CacheConfig(sidecar=tmp_path / ("ü" * 64))


def test_the_longest_sidecar_path_is_taken() -> None:
    path = "/" + "x" * 126
    assert CacheConfig(sidecar=Path(path)).settings()["hobbit.sidecar"] == path


def test_a_chat_needs_tokens_and_a_folder_for_its_statistics(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        ChatConfig(max_tokens=0)
    with pytest.raises(ConfigError, match="create it first"):
        ChatConfig(stats_json=tmp_path / "no" / "stats.json")
    ChatConfig(max_tokens=1, stats_json=tmp_path / "stats.json")


def test_an_answer_ends_by_itself_where_nobody_limits_it() -> None:
    ChatConfig(max_tokens=ChatConfig.no_limit)
    with pytest.raises(ConfigError, match="max_tokens is -2"):
        ChatConfig(max_tokens=-2)
    with pytest.raises(ConfigError, match="--think is 'maybe'; choose one of on, off, hide"):
        ChatConfig(think="maybe")


def test_beams_and_drafts_are_for_whoever_asks() -> None:
    assert (EngineConfig().n_beams, EngineConfig().n_drafts) == (1, 0)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SamplingConfig, {"temp": 0, "top_k": 0, "top_p": 0, "min_p": 0, "repeat_penalty": 0.1, "seed": 0}),
        (SamplingConfig, {"top_k": 2**31 - 1, "top_p": 1, "min_p": 1, "seed": 2**32 - 2}),
        (EngineConfig, {"n_ctx": 1, "n_batch": 1, "n_beams": 1, "n_drafts": 0, "n_threads": 1}),
        (EngineConfig, {"n_batch": 65536, "n_beams": 64, "n_drafts": 15, "n_threads": 512}),
        (CacheConfig, {"price": 0.5, "t1": 1.0, "t2": 1.0}),
        (CacheConfig, {"price": 0.0, "t1": 0.5}),
        (CacheConfig, {"t1": 0, "t2": None}),
        (CacheConfig, {"weights": (0.5, 0.25, 0.25 + 5e-7, 0)}),
        (CacheConfig, {"memory": 1, "pools": 1}),
        (CacheConfig, {"device": "x" * 127, "device_memory": 1}),
        (CacheConfig, {"device": "x"}),
        (CalibrationConfig, {"max_kl": 0, "max_chunks": 4, "cost_chunks": 1}),
        (CalibrationConfig, {"engine": EngineConfig(n_ctx=3), "rule": "edgemoe"}),
    ],
)
def test_values_at_their_bounds_are_taken(kind: Callable[..., object], settings: dict[str, object]) -> None:
    kind(**settings)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (CacheConfig, {"memory": 0}, "memory is 0; it must be positive"),
        (CacheConfig, {"device_memory": 0}, "device_memory is 0; it must be positive"),
        (CacheConfig, {"mode": "cpu"}, "mode is 'cpu'; choose one of gpu, cooperative, auto, twiddler"),
        (CacheConfig, {"device": ""}, "device is ''; it takes 1 to 127 bytes"),
        (CacheConfig, {"device": "x" * 128}, "it takes 1 to 127 bytes"),
        (CacheConfig, {"pools": -1}, "pools is -1"),
        (CacheConfig, {"io_threads": 0}, "io_threads is 0"),
        (CacheConfig, {"t1": -0.1}, "t1 is -0.1; it must lie between 0 and 1"),
        (CacheConfig, {"t2": 1.1}, "t2 is 1.1"),
        (CacheConfig, {"t2": float("nan")}, "t2 is nan"),
        (CacheConfig, {"low_share": 2.0}, "low_share is 2.0"),
        (CacheConfig, {"prefetch": -1}, "prefetch is -1; it must lie between 0 and 4"),
        (CacheConfig, {"prefetch": 5}, "prefetch is 5"),
        (CacheConfig, {"weights": (1.5, -0.5, 0.0, 0.0)}, "weights is 1.5; it must lie between 0 and 1"),
        (CacheConfig, {"weights": (0.5, 0.5)}, "weights has 2 numbers; give 4: w_lru, w_lfu, w_lhu, w_fld"),
        (CacheConfig, {"weights": (float("nan"), 0.0, 0.0, 1.0)}, "weights is nan"),
        (CacheConfig, {"policy": "nope"}, "policy is 'nope'; choose one of "),
        (CacheConfig, {"trace": Path("/" + "x" * 127)}, "longer than 127 bytes"),
        (CacheConfig, {"t1": "0.5"}, "t1 is '0.5'; it must be a number"),
        (CacheConfig, {"low_share": True}, "low_share is True; it must be a number"),
        (CacheConfig, {"memory": "8G"}, "memory is '8G'; it must be a whole number"),
        (CacheConfig, {"prefetch": 1.5}, "prefetch is 1.5; it must be a whole number"),
        (CacheConfig, {"weights": ("1", 0, 0, 0)}, "weights is '1'; it must be a number"),
        (EngineConfig, {"n_ctx": -1}, "n_ctx is -1; it must be positive"),
        (EngineConfig, {"n_ctx": "512"}, "n_ctx is '512'; it must be a whole number"),
        (SamplingConfig, {"temp": "hot"}, "temp is 'hot'; it must be a number"),
        (SamplingConfig, {"seed": 1.0}, "seed is 1.0; it must be a whole number"),
        (SamplingConfig, {"temp": -1.0}, "temp is -1.0"),
        (SamplingConfig, {"temp": float("nan")}, "temp is nan"),
        (SamplingConfig, {"seed": 2**32 - 1}, "seed is 4294967295; it must lie between 0 and 4294967294"),
        (EngineConfig, {"n_threads": -2}, "n_threads is -2; it must be positive"),
        (SamplingConfig, {"temp": float("inf")}, "temp is inf; it must be 0 (greedy) or more"),
        (SamplingConfig, {"top_k": -2}, "top_k is -2; it must be 0, -1 (all tokens) or more"),
        (SamplingConfig, {"top_k": 2**31}, "top_k is 2147483648"),
        (SamplingConfig, {"top_p": 1.1}, "top_p is 1.1; it must lie between 0 and 1"),
        (SamplingConfig, {"min_p": -0.1}, "min_p is -0.1; it must lie between 0 and 1"),
        (SamplingConfig, {"repeat_penalty": 0}, "repeat_penalty is 0; it must be above 0"),
        (SamplingConfig, {"repeat_penalty": float("inf")}, "repeat_penalty is inf"),
        (SamplingConfig, {"seed": -2}, "seed is -2; it must lie between 0 and 4294967294, or be -1 for any"),
        (EngineConfig, {"n_batch": 65537}, "n_batch is 65537; a pass has at most 65536 tokens"),
        (EngineConfig, {"n_beams": 65}, "n_beams is 65; a search keeps at most 64"),
        (EngineConfig, {"n_beams": 0}, "n_beams is 0; it must be positive"),
        (EngineConfig, {"n_drafts": -1}, "n_drafts is -1; it must lie between 0 and 15"),
        (EngineConfig, {"n_drafts": 16}, "n_drafts is 16; it must lie between 0 and 15"),
        (EngineConfig, {"n_threads": 513}, "n_threads is 513; ggml computes with at most 512 threads"),
        (CacheConfig, {"strict": 1}, "strict is 1; it must be True or False"),
        (CalibrationConfig, {"engine": EngineConfig(n_ctx=2)}, "--ctx is 2; it must be at least 3"),
        (CalibrationConfig, {"max_kl": -0.1}, "--max-kl is -0.1; it must be 0 or more"),
        (CalibrationConfig, {"max_kl": float("nan")}, "--max-kl is nan; it must be 0 or more"),
        (CalibrationConfig, {"max_chunks": 3}, "--chunks is 3; it must be at least 4"),
        (CalibrationConfig, {"cost_chunks": 0}, "cost_chunks is 0; it must be positive"),
        (CalibrationConfig, {"rule": "rank"}, "the rule is 'rank'; choose one of price, gate, edgemoe"),
    ],
)
def test_a_value_that_cannot_be_is_refused(
    kind: Callable[..., object], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kind(**settings)


def test_an_evaluation_is_strict_by_the_rule_gate_on_the_processor_unless_it_is_told_otherwise() -> None:
    settings = evaluation_settings(EngineConfig(), "gate")
    assert (settings["hobbit.enable"], settings["hobbit.device"]) == (True, "CPU")
    assert (settings["hobbit.policy"], settings["hobbit.rule"]) == ("lru", "gate")
    assert settings["hobbit.strict"] is True
    weighted = EngineConfig(cache=CacheConfig(weights=(1, 0, 0, 0)))
    assert evaluation_settings(weighted, "gate")["hobbit.policy"] == "hobbit"


def test_a_context_is_as_large_as_asked_or_the_least_and_never_above_the_models() -> None:
    assert EngineConfig().context_tokens(trained=40960) == 4096
    assert EngineConfig().context_tokens(trained=512) == 512
    assert EngineConfig(n_ctx=0).context_tokens(trained=40960) == 40960
    assert EngineConfig().larger_contexts(trained=512) == set()
    assert EngineConfig().larger_contexts(trained=4096) == set()
    assert EngineConfig().larger_contexts(trained=10000) == {8192, 10000}
    assert EngineConfig(n_ctx=512).context_tokens(trained=512) == 512
    with pytest.raises(
        HobbitError, match=r"a context of 513 is too large: .* 512 tokens at most; use --ctx 512"
    ):
        EngineConfig(n_ctx=513).context_tokens(trained=512)


def test_the_models_own_sampling_stands_behind_what_is_given() -> None:
    own = {"general.sampling.temp": 0.10999999940395355, "general.sampling.top_k": "7"}
    config = ChatConfig(sampling=SamplingConfig(temp=0.5), given=["temp"])
    assert config.sampling_of(own.get) == SamplingConfig(temp=0.5, top_k=7)
    assert replace(config, given=()).sampling_of(own.get) == SamplingConfig(temp=0.11, top_k=7)
    assert replace(config, given=()).sampling_of({}.get) == SamplingConfig(temp=0.5)
    assert ChatConfig().sampling_of(own.get) == SamplingConfig()


def test_a_models_own_values_that_cannot_be_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "general.sampling.top_k": -1,
        "general.sampling.top_p": 1.5,
        "general.sampling.temp": "nan",
        "general.sampling.min_p": 0.25,
        "general.sampling.penalty_repeat": 0.0,
    }
    assert replace(ChatConfig(), given=()).sampling_of(own.get) == SamplingConfig(top_k=-1, min_p=0.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "the model's own general.sampling.top_p is left out: it is 1.5" in lines[1]


def test_a_kv_cache_has_types_that_llama_cpp_knows() -> None:
    with pytest.raises(ConfigError, match="a KV cache cannot be in q3_k; choose one of f32, f16, bf16"):
        EngineConfig(cache_type_v="q3_k")
