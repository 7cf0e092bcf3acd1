# SPDX-License-Identifier: MIT
"""The configurations of papers: what the engine then does, by its counters, and what is given beside them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import logits
import models
import numpy as np
import pytest
from exactness import SHORT_PLANS

from pyhobbit import CacheConfig, Engine, EngineConfig, Hobbit, SamplingConfig
from pyhobbit.cli.main import main
from pyhobbit.engine.stats import CacheStats
from pyhobbit.errors import ConfigError, HobbitError
from pyhobbit.model.file_names import calibration_path
from pyhobbit.model.options_file import write_options
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration
from pyhobbit.routing.paths import chosen_of, path_table
from pyhobbit.routing.trace import Simulation, SimulationResult, Trace, read_trace, simulate
from pyhobbit.settings.config import parse_size
from pyhobbit.settings.papers import PAPERS, settings_of
from pyhobbit.settings.resolve import check_settings

pytestmark = pytest.mark.model

PROMPT = "def read_file(path):\n"
N_LAYERS, N_EXPERTS, N_USED, N_TOKENS = 6, 8, 2, 32
ALONE: dict[str, Any] = {"prefetch": 0}  # so that the policy alone decides what is resident
ON_CPU: dict[str, Any] = {**ALONE, "mode": "auto", "early": False, "degrade": False}
IS_LOW = np.tile([True, False, True, True, False, False, True, False], N_LAYERS)  # [layer x expert]
USES = tuple(int(n) for n in np.random.default_rng(3).permutation(N_LAYERS * N_EXPERTS) + 1)
COUNTED = ("hits_high", "misses_high", "hits_low", "misses_low")


class Run:
    """An answer's decoded tokens: counters of the prompt and of all, and the trace."""

    def __init__(self, model: Path, trace: Path, pools: str, **settings: Any) -> None:
        settings = {name: value for name, value in settings.items() if name != "mode"}  # needs a GPU
        cache = CacheConfig(pools=parse_size(pools), trace=trace, **settings)
        with Engine(model, EngineConfig(cache, n_ctx=256)) as engine:
            _wait_for_fill(engine, calibration_path(model).exists())
            pieces = engine.generate(PROMPT, N_TOKENS, SamplingConfig(temp=0))
            next(pieces)
            self.prompt = engine.stats().cache
            self.n_decoded = sum(1 for _ in pieces)
            self.all = engine.stats().cache
            self.info = engine.info()
        self.trace: Trace = read_trace(trace)

    def counted(self, name: str) -> int:
        return getattr(self.all, name) - getattr(self.prompt, name)

    def equals(self, result: SimulationResult) -> bool:
        return all(getattr(result, name) == self.counted(name) for name in COUNTED)

    def simulation(self, policy: str, **given: Any) -> Simulation:
        slots = self.info.pool_slots_high, self.info.pool_slots_low
        return Simulation(N_LAYERS, N_EXPERTS, N_USED, *slots, policy, floors=True, **given)

    def is_only(self, policy: str, **given: Any) -> bool:
        """True if the engine kept the experts of this policy, and not those of LRU."""
        own = self.simulation(policy, **given)
        same, lru = (simulate(self.trace.routes, each) for each in (own, replace(own, policy="lru")))
        return self.equals(same) and not self.equals(lru)


def _wait_for_fill(engine: Engine, is_calibrated: bool) -> None:
    """A calibration's most used experts are read in the background, each in three parts."""
    info, end = engine.info(), time.monotonic() + 300
    n_reads = 3 * (info.pool_slots_high + info.pool_slots_low) * is_calibrated
    while engine.stats().cache.reads < n_reads:
        assert time.monotonic() < end
        time.sleep(0.05)


def _calibrated(source: Path, folder: Path, **found: Any) -> Path:
    """A copy of a model, with what is known of its experts."""
    model = folder / "m.gguf"
    model.symlink_to(source)
    with Engine(model, EngineConfig(CacheConfig(pools=6 << 20), n_ctx=256)) as engine:
        low_bytes = engine.info().tier_bytes_low
    given = (source.stat().st_size, low_bytes, 1.0, 1.0, 0.3, "lru", (1.0, 0.0, 0.0, 0.0))
    Calibration(*given, expert_uses=USES, **found).write(model)
    return model


def _missed_again(trace: Trace, placed: np.ndarray) -> int:
    """Uses of placed experts [layer, n] by decoded tokens that found them missing, but for each one's first.

    The prompt, which streams through the pool, may have evicted them.
    """
    rows = np.genfromtxt(trace.path, delimiter=",", names=True, skip_header=2 + N_LAYERS)
    missed = rows[(rows["phase"] == 1) & (rows["residency"] == 0)]
    layer, expert = (missed[name].astype(int) for name in ("layer", "expert"))
    of_placed = np.any(placed[layer] == expert[:, None], axis=1)
    return int(of_placed.sum() - np.unique((layer * N_EXPERTS + expert)[of_placed]).size)


def test_hobbit_runs_eq_2_at_its_thresholds_and_keeps_by_eq_3(tiny_gguf: Path, tmp_path: Path) -> None:
    run = Run(tiny_gguf, tmp_path / "t.csv", "4M", **settings_of("hobbit", ALONE), **ALONE)
    assert run.is_only("hobbit", t1=0.6, t2=0.9)
    assert run.counted("selections_low") > 0
    assert run.counted("selections_skipped") > 0
    ahead = Run(tiny_gguf, tmp_path / "ahead.csv", "4M", **settings_of("hobbit", {}))
    assert ahead.all.predicted > 0


def test_edgemoe_gives_each_expert_one_width_and_learns_paths(tmp_path: Path) -> None:
    low = tuple(np.where(IS_LOW, 1e-9, 1.0).tolist())
    costs = Costs(low, (float("inf"),) * len(low))
    found: dict[str, Any] = {"rule": "edgemoe", "price": 1e-3, "costs": costs}
    model = _calibrated(models.tiny_tiers("f16", "q4_0"), tmp_path, **found)
    run = Run(model, tmp_path / "t.csv", "4M", **settings_of("edgemoe", ALONE), **ALONE, strict=True)
    routes = run.trace.routes[run.trace.routes["counted"] != 0]
    n_low = int(IS_LOW[routes["layer"] * N_EXPERTS + routes["expert"]].sum())
    assert (run.counted("selections_low"), run.counted("selections_high")) == (n_low, routes.size - n_low)
    high = Run(model, tmp_path / "h.csv", "4M", **settings_of("edgemoe", ALONE), **ALONE, price=0.0)
    uses = np.reshape(USES, (N_LAYERS, N_EXPERTS))
    rates = N_USED * uses / uses.sum(axis=1, keepdims=True)
    assert high.is_only("edgemoe", prior=tuple(rates.ravel().tolist()))
    ahead = Run(model, tmp_path / "ahead.csv", "4M", **settings_of("edgemoe", {}))
    assert 0 < ahead.all.predicted_right < ahead.all.predicted
    assert ahead.prompt.predicted == 0  # nothing is learnt yet
    (tmp_path / "learnt").mkdir()
    paths = path_table(chosen_of(ahead.trace.routes), N_EXPERTS)
    learnt = _calibrated(models.tiny_tiers("f16", "q4_0"), tmp_path / "learnt", paths=paths, **found)
    again = Run(learnt, tmp_path / "again.csv", "4M", **settings_of("edgemoe", {}))
    assert again.prompt.predicted_right > 0.5 * again.prompt.predicted > 0


def test_mobile_drafts_with_half_of_the_experts_and_repeats_what_is_unsure(tmp_path: Path) -> None:
    run = Run(models.tiny(), tmp_path / "t.csv", "64M", **settings_of("mobile", {}), strict=True)
    n_repeated = run.counted("tokens_repeated")
    assert 0 < n_repeated < run.n_decoded
    assert run.prompt.selections_skipped == 0
    n_kept = run.n_decoded - n_repeated
    assert run.counted("selections_skipped") == n_kept * N_LAYERS * N_USED // 2
    assert run.counted("selections_high") == (n_repeated + n_kept / 2) * N_LAYERS * N_USED


def test_twiddler_leaves_the_experts_of_the_profile_where_they_are(tmp_path: Path) -> None:
    model = _calibrated(models.tiny(), tmp_path)
    run = Run(model, tmp_path / "t.csv", "6M", **settings_of("twiddler", {}))
    assert run.all.predicted == 0
    placed = np.argsort(np.reshape(USES, (N_LAYERS, N_EXPERTS)), axis=1)[:, -N_USED:]  # a layer's even share
    lru = Run(model, tmp_path / "lru.csv", "6M", **settings_of("twiddler", {}) | {"policy": "lru"})
    # some, until the places that the prompt took are free again: a layer's even share is not taken from it
    assert 4 * _missed_again(run.trace, placed) < _missed_again(lru.trace, placed)
    assert run.counted("misses_high") > 0


def test_daop_places_by_the_prompt(tmp_path: Path) -> None:
    run = Run(models.tiny(), tmp_path / "t.csv", "8M", **settings_of("daop", ON_CPU), **ON_CPU)
    assert run.is_only("prompt")
    near = Run(models.tiny(), tmp_path / "near.csv", "8M", **settings_of("daop", {"early": False}))
    assert near.counted("selections_replaced") > 0


@pytest.mark.parametrize("paper", ["twiddler", "daop"])
def test_what_needs_a_gpu_says_so(paper: str, tmp_path: Path) -> None:
    model = _calibrated(models.tiny(), tmp_path)
    with pytest.raises(HobbitError, match="name a GPU with"):
        Engine(model, EngineConfig(CacheConfig(pools=6 << 20, **settings_of(paper, {})), n_ctx=256)).open()


@pytest.mark.parametrize(
    ("paper", "does"),
    [
        ("twiddler", lambda stats: stats.predicted == 0),
        ("daop", lambda stats: stats.selections_early > 0),
    ],
)
def test_on_a_device_the_cpu_computes_what_is_missing(
    paper: str, does: Callable[[CacheStats], bool], tmp_path: Path, rpc: str
) -> None:
    model = _calibrated(models.tiny(), tmp_path)
    cache = CacheConfig(device="RPC0", pools=6 << 20, **settings_of(paper, {}))
    result = logits.run(models.lib_dir(), model, SHORT_PLANS, cache.settings(), rpc=rpc)
    stats = CacheStats(**{name: result.stats[name] for name in CacheStats.__dataclass_fields__})
    assert stats.selections_cpu > 0
    assert does(stats)


#
# beside other settings
#


@pytest.mark.parametrize("paper", PAPERS)
def test_every_paper_is_a_configuration(paper: str) -> None:
    check_settings(CacheConfig(**settings_of(paper, {})).settings())


def test_an_option_that_is_given_comes_first(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(tiny_gguf)
    write_options(model, {"policy": "lru", "io_threads": 2})
    assert main(["config", str(model), "--pools", "6M", "--paper", "hobbit", "--t1", "0.5"]) == 0
    shown = capsys.readouterr()
    rows = {words[0]: words[1:] for words in map(str.split, shown.out.splitlines()) if len(words) > 1}
    assert rows["t1"][:2] == ["0.5", "flag"]
    assert rows["t2"][:2] == ["0.9", "flag"]
    assert rows["policy"][:2] == ["hobbit", "flag"]
    assert rows["io_threads"][:2] == ["2", "options"]
    (line,) = (line for line in shown.err.splitlines() if "--paper" in line)
    assert line == (
        "pyhobbit: --paper hobbit sets rule gate, t2 0.9, policy hobbit, predictor router; t1 as given; "
        "it needs a low tier"
    )


def test_the_keyword_of_hobbit(tiny_gguf: Path) -> None:
    cache = CacheConfig(pools=6 << 20, policy="lfu")
    with Hobbit(str(tiny_gguf), paper="hobbit", cache=cache, t2=0.8, n_ctx=64, verbose=False) as llm:
        found = llm.cache_config
    assert (found.t1, found.t2, found.policy, found.predictor) == (0.6, 0.8, "lfu", "router")


@pytest.mark.parametrize("verb", ["chat", "serve", "bench", "inspect", "config"])
def test_an_unknown_paper_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "m.gguf", "--paper", "hobit"]) == 2
    assert "there is no paper 'hobit'; choose one of hobbit, edgemoe, mob" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no paper"):
        settings_of("", {})
