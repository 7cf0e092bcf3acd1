# SPDX-License-Identifier: MIT
"""Our options of `pyhobbit serve` beside llama-server's, and the arguments that llama-server gets."""

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
from models import random_model

from pyhobbit.cli import serve, several_models
from pyhobbit.cli.help import Parser
from pyhobbit.cli.options import cache_config
from pyhobbit.cli.server_flags import Flag, known
from pyhobbit.engine import plan
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.settings.config import CacheConfig


def _parse(*arguments: str) -> argparse.Namespace:
    parser = Parser(exit_on_error=False)
    serve.add_arguments(parser)
    return serve.parse(parser, arguments)


def _planned(model: Path, cache: CacheConfig, flags: list[str]) -> Any:
    return serve._check_memory(model, cache, argparse.Namespace(batch=None, passed_on=flags))


def test_our_llama_server_lists_its_options() -> None:
    flags = known()
    assert len(flags) > 300
    assert flags["-c"] == flags["--ctx-size"] == Flag(("-c", "--ctx-size"), 1, "LLAMA_ARG_CTX_SIZE")
    assert flags["--perf"].names == ("--perf", "--no-perf")
    for name in ("--host", "--port", "--parallel", "--ctx-size", "--cache-ram", "--override-kv", "--fit"):
        assert flags[name].n_values == 1, name
    for name in ("--metrics", "--jinja", "--no-ui", "-kvu"):
        assert flags[name].n_values == 0, name
    assert [name for name, flag in flags.items() if flag.n_values == 2] == ["--control-vector-layer-range"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("m.gguf", "-c", "100", "--no-perf", "--set", "t1=0.5"),
        ("-c", "100", "--no-perf", "m.gguf", "--set", "t1=0.5"),
        ("--ctx-size=100", "--set=t1=0.5", "--no_perf", "m.gguf"),
        ("--ctx", "100", "--set=t1=0.5", "--no_perf", "m.gguf"),
        ("m.gguf", "--ctx=100", "--no-perf", "--set", "t1=0.5"),
        ("-c", "100", "--no-perf", "-m", "m.gguf", "--set", "t1=0.5"),
        ("-c", "100", "--no-perf", "--model=m.gguf", "--set", "t1=0.5"),
    ],
)
def test_the_model_may_stand_anywhere(arguments: tuple[str, ...]) -> None:
    args = _parse(*arguments)
    assert args.model == "m.gguf"
    assert args.t1 == 0.5
    assert args.passed_on in (["-c", "100", "--no-perf"], ["--ctx-size", "100", "--no-perf"])


def test_options_that_begin_like_others_are_not_taken_apart() -> None:
    args = _parse("m.gguf", "-ctk", "f16", "-hff", "x.gguf", "--seed", "-1", "-hf", "a/b")
    assert args.passed_on == ["-ctk", "f16", "-hff", "x.gguf", "--seed", "-1"]
    assert args.hf_repo == "a/b"


def test_the_experts_device_is_ours_and_that_of_the_other_layers_llama_servers() -> None:
    args = _parse("m.gguf", "--device", "RPC0", "--device-memory=1G", "-dev", "none", "--rpc", "h:1")
    assert (args.device, args.device_memory) == ("RPC0", "1G")
    assert args.passed_on == ["-dev", "none", "--rpc", "h:1"]
    _, overrides, *_ = serve.server_arguments(cache_config(args).settings(), None, args.passed_on)
    assert "hobbit.device=str:RPC0" in overrides.split(",")
    assert f"hobbit.device_memory=int:{1 << 30}" in overrides.split(",")


def test_an_option_with_two_values_takes_both() -> None:
    args = _parse("--control-vector-layer-range", "1", "2", "m.gguf")
    assert args.model == "m.gguf"
    assert args.passed_on == ["--control-vector-layer-range", "1", "2"]


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no option --paralel; did you mean --parallel\?"):
        _parse("m.gguf", "--paralel", "2")
    with pytest.raises(ConfigError, match="no option --t; see: pyhobbit serve --help"):
        _parse("m.gguf", "--t", "2")
    with pytest.raises(ConfigError, match=r"did you mean --flash-attn\?"):
        _parse("m.gguf", "--flash-atn", "on")
    with pytest.raises(ConfigError, match="see: pyhobbit serve --help"):
        _parse("m.gguf", "--xyzzyxyzzy")


def test_defaults_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = known()
    for flag in ("--ctx-size", "--cache-ram", "--metrics", "--cors-origins"):
        monkeypatch.delenv(str(flags[flag].variable), raising=False)
    defaults = serve.server_arguments({}, None, [])
    origins = ["--cors-origins", "localhost"]
    assert defaults == ["--ctx-size", "8192", "--cache-ram", "0", "--metrics", *origins]
    given = ["-c", "1024", "-cram", "64", "--metrics", *origins]
    assert serve.server_arguments({}, None, given) == given
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "2048")
    assert "--ctx-size" not in serve.server_arguments({}, None, [])


def test_the_batch_is_that_of_llama_server() -> None:
    def batch_of(n_batch: int | None) -> list[str]:
        given = ["-c", "9", "-cram", "0", "--metrics", "--cors-origins", "*"]
        return serve.server_arguments({}, n_batch, given)[: -len(given)]

    assert batch_of(None) == []
    assert batch_of(512) == ["--batch-size", "2048", "--ubatch-size", "512"]
    assert batch_of(4096) == ["--batch-size", "4096", "--ubatch-size", "4096"]
    assert _parse("m.gguf", "--batch", "1024", "-c", "9").batch == 1024
    serve._check_batch(1024, ["-c", "9"])
    serve._check_batch(None, ["-ub", "64"])
    with pytest.raises(ConfigError, match="--batch sets --batch-size and --ubatch-size"):
        serve._check_batch(1024, ["-ub", "64"])
    with pytest.raises(ConfigError, match="n_batch is 0"):
        serve.run(_parse("m.gguf", "--batch", "0"))


def test_the_models_of_a_folder_share_the_memory() -> None:
    cache, folder = CacheConfig(memory=8 << 30), ["--models-dir", "d"]
    assert several_models.shared(cache, []) == (cache, [])
    assert several_models.shared(cache, folder) == (cache, [*folder, "--models-max", "1"])
    two = [*folder, "--models-max", "2"]
    assert several_models.shared(cache, two) == (CacheConfig(memory=4 << 30), two)
    assert several_models.shared(CacheConfig(), two) == (CacheConfig(), two)
    rows = several_models.rows(8 << 30, 4 << 30, two)
    assert rows["models"] == "those of d, at most 2 at a time"
    assert rows["memory"] == "up to 8.0 GiB by --memory, 4.0 GiB for each model"
    one = several_models.rows(8 << 30, 8 << 30, [*folder, "--models-max", "1"])
    assert (one["models"], one["memory"]) == ("those of d, one at a time", "up to 8.0 GiB by --memory")
    assert several_models.rows(8 << 30, 8 << 30, []) == {}
    with pytest.raises(ConfigError, match="give --models-max a number of at least 1"):
        several_models.shared(cache, [*folder, "--models-max", "0"])


def test_the_address_is_one_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve.server_flags, "has_web_page", lambda: True)
    assert serve._address([]) == (
        "http://127.0.0.1:8080 with the web page, the cache at http://127.0.0.1:8080/panel, "
        "OpenAI's API at http://127.0.0.1:8080/v1"
    )
    given = ["--host", "::1", "--port", "9000", "--no-ui"]
    assert serve._address(given) == (
        "http://[::1]:9000, the cache at http://[::1]:9000/panel, OpenAI's API at http://[::1]:9000/v1"
    )
    assert serve._address(["--host", "a.sock"]) == "the socket a.sock"
    assert "a free port" in serve._address(["--port", "0"])
    monkeypatch.setattr(serve.server_flags, "has_web_page", lambda: False)
    assert "web page" not in serve._address([])


def test_settings_become_overrides() -> None:
    cache = CacheConfig(pools=1000, t1=0.5, policy="lru", sidecar=Path("a,b.gguf"))
    first, overrides, *_ = serve.server_arguments(cache.settings(), None, [])
    assert first == "--override-kv"
    assert overrides.split(",", 1)[0] == "hobbit.enable=bool:true"
    for part in ("hobbit.pools=int:1000", "hobbit.t1=float:0.5", "hobbit.policy=str:lru"):
        assert part in overrides.split(",")
    assert '"hobbit.sidecar=str:a,b.gguf"' in overrides


def test_a_context_that_does_not_fit_is_refused(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = functools.partial(_planned, tiny_gguf, CacheConfig())
    plain, q8_0 = check([]), check(["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"])
    assert 0 < q8_0.context < 0.6 * plain.context
    assert plain.info.n_ctx == 4 * 512  # each slot has as many as the model was trained for
    monkeypatch.setattr(plan, "available_memory", lambda: 20 << 20)
    check(["-c", "512"])
    with pytest.raises(HobbitError, match=r"for a context of 8192 tokens.*use a smaller context$"):
        check(["-c", "8192"])
    check(["-c", "8192", "--batch-size", "32"])


def test_a_budget_that_is_too_small_is_refused(tiny_gguf: Path) -> None:
    with pytest.raises(HobbitError, match=r"memory budget of 1\.0 MiB is too small"):
        _planned(tiny_gguf, CacheConfig(memory=1 << 20), [])


def test_overrides_of_the_user_join_ours() -> None:
    settings = CacheConfig(pools=1000, t1=0.5).settings()
    given = ["--override-kv", "hobbit.t1=float:0.7,a.b=int:1", "-c", "9", "--override-kv", "c=bool:true"]
    first, overrides, *others = serve.server_arguments(settings, None, given)
    assert first == "--override-kv"
    assert sorted(overrides.split(",")) == [
        "a.b=int:1",
        "c=bool:true",
        "hobbit.enable=bool:true",
        "hobbit.pools=int:1000",
        "hobbit.t1=float:0.7",
    ]
    assert "--override-kv" not in others
    assert serve.server_arguments({}, None, given[:2])[:2] == given[:2]


def test_the_context_of_a_server_is_chosen_by_memory() -> None:
    path = random_model("qwen3moe")  # trained for less than the least, which its slots share
    found = _planned(path, CacheConfig(), [])
    assert found is not None
    assert (found.chose_context, found.info.n_ctx) == (True, serve._CONTEXT)
    given = _planned(path, CacheConfig(), ["-c", "600"])
    assert given is not None
    assert (given.chose_context, given.info.n_ctx) == (False, 600)
    whole = _planned(path, CacheConfig(), ["-c", "0"])  # as llama-server takes it
    assert whole is not None
    assert (whole.chose_context, whole.info.n_ctx) == (False, whole.info.n_ctx_train)
    assert _planned(path, CacheConfig(), ["--no-kv-offload"]) is None
