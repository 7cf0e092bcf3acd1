# SPDX-License-Identifier: MIT
"""Experts that stay where earlier runs, or the prompt, put them (the policies static and prompt)."""

import shutil
from pathlib import Path

import logits
import models
import numpy as np
import pytest
from exactness import SHORT_PLANS

from pyhobbit import CacheConfig, Engine, EngineConfig, HobbitError, SamplingConfig
from pyhobbit.quality.stored import Calibration

pytestmark = pytest.mark.model

N_LAYERS, N_EXPERTS = 6, 8
LOW_BYTES = N_LAYERS * N_EXPERTS * 3 * 256 * 256 * 9 // 16
USES = tuple(expert + 1 for _ in range(N_LAYERS) for expert in range(N_EXPERTS))


def _text(model: Path, policy: str) -> str:
    config = EngineConfig(cache=CacheConfig(pools=6 << 20, policy=policy, t1=1.0), n_ctx=256)
    with Engine(model, config) as engine:
        pieces = engine.generate("def read_file(path):", 24, SamplingConfig(temp=0))
        return "".join(piece.text for piece in pieces)


def test_static_needs_the_uses_of_earlier_runs(tiny_gguf: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    shutil.copyfile(tiny_gguf, model)
    with pytest.raises(HobbitError, match=r"nothing is known of .*: run pyhobbit calibrate"):
        _text(model, "static")
    numbers = ({"t1": 1.0, "t2": 1.0}, 0.25)
    Calibration(model.stat().st_size, LOW_BYTES, *numbers, expert_uses=USES).write(model)
    assert _text(model, "static") == _text(model, "lru")


def test_the_prompts_placement_changes_no_text(tiny_gguf: Path) -> None:
    assert _text(tiny_gguf, "prompt") == _text(tiny_gguf, "lru")


@pytest.mark.parametrize(("mode", "policy"), [("cooperative", "prompt"), ("twiddler", "lfu")])
def test_the_papers_placements_change_no_logits(
    tiny_gguf: Path, rpc: str, on_cpu: logits.Result, mode: str, policy: str
) -> None:
    settings: dict[str, logits.Override] = {"hobbit.mode": mode, "hobbit.policy": policy}
    settings |= {"hobbit.device": "RPC0", "hobbit.pools": on_cpu.info["tier_bytes_high"] // 2}
    result = logits.run(models.lib_dir(), tiny_gguf, SHORT_PLANS, settings, rpc=rpc)
    for name, wanted in on_cpu.logits.items():
        np.testing.assert_array_equal(result.logits[name], wanted, name)
    assert result.stats["selections_cpu"] > 0
