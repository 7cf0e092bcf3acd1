# SPDX-License-Identifier: MIT
"""The settings that a paper's configuration gives a model, by what the model's calibration stores."""

import math
import shutil
from pathlib import Path
from typing import Any

import models
import pytest

from pyhobbit import CacheConfig
from pyhobbit.errors import HobbitError
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration
from pyhobbit.settings.papers import PAPERS, settings_of
from pyhobbit.settings.resolve import resolve
from pyhobbit.settings.table import default

pytestmark = pytest.mark.model

N_EXPERTS, LOW_BYTES = 48, 6 * 8 * 3 * 256 * 256 * 9 // 16
FITTED = (0.1, 0.2, 0.3, 0.4)
SHARES = {"gate.low_share": 0.2, "price.low_share": 0.25, "edgemoe.low_share": 0.3}
PRICES = {"price": 0.125, "gate": 0.125, "edgemoe": 0.003}
CALIBRATED = ("none", *PRICES)

HOBBIT = {"rule": "gate", "t1": 0.6, "t2": 0.9, "policy": "hobbit", "predictor": "router", "low_share": None}
MOBILE = {"rule": "rank", "t1": 0.5, "t2": 0.5, "confidence": 0.7, "policy": "lru", "prefetch": 0}
TWIDDLER = {"t1": 1.0, "t2": 1.0, "price": 0.0, "mode": "twiddler", "policy": "static", "prefetch": 0}
DAOP = {
    "t1": 1.0, "t2": 1.0, "price": 0.0, "mode": "cooperative", "policy": "prompt", "predictor": "router",
    "prefetch": 1, "early": True, "early_from": 4, "degrade": True,
}  # fmt: skip
EDGEMOE = {
    "rule": "edgemoe", "price": 0.003, "policy": "edgemoe", "predictor": "paths-exact", "prefetch": 1,
    "low_share": 0.3,
}  # fmt: skip
NO_COSTS = (
    "the rule edgemoe needs the costs that a calibration measures, and .* has none: run pyhobbit calibrate"
)
OTHER_COSTS = "has those of the rule price: run pyhobbit calibrate --set rule=edgemoe, or give t1 and t2"
EXPECTED: dict[tuple[str, str], dict[str, Any] | str] = {
    **{("hobbit", each): {**HOBBIT, "weights": FITTED} for each in PRICES},
    ("hobbit", "none"): {**HOBBIT, "weights": default("weights")},
    **{("mobile", each): {**MOBILE, "low_share": 0.0} for each in CALIBRATED},
    **{("twiddler", each): {**TWIDDLER, "low_share": None} for each in CALIBRATED},
    **{("daop", each): {**DAOP, "low_share": None} for each in CALIBRATED},
    ("edgemoe", "none"): NO_COSTS,
    ("edgemoe", "price"): OTHER_COSTS,
    ("edgemoe", "gate"): OTHER_COSTS,
    ("edgemoe", "edgemoe"): EDGEMOE,
}


def _model(folder: Path, rule: str) -> Path:
    path = Path(shutil.copyfile(models.tiny_tiers("f16", "q4_0"), folder / "m.gguf"))
    if rule != "none":
        costs = Costs((0.5,) * N_EXPERTS, (math.inf,) * N_EXPERTS)
        numbers = {"t1": 0.5, "t2": 0.8, "price": PRICES[rule]}
        given = (path.stat().st_size, LOW_BYTES, numbers, SHARES[f"{rule}.low_share"], FITTED)
        uses = (1,) * N_EXPERTS
        Calibration(*given, rule, costs, expert_uses=uses, found=SHARES).write(path)
    return path


@pytest.mark.parametrize(("paper", "stored"), [each for each in EXPECTED if each[0] in PAPERS])
def test_a_paper_resolves_to_its_settings(paper: str, stored: str, tmp_path: Path) -> None:
    model, expected = _model(tmp_path, stored), EXPECTED[paper, stored]
    settings = CacheConfig(**settings_of(paper, {"device": "CPU"})).settings()
    if isinstance(expected, str):
        with pytest.raises(HobbitError, match=expected):
            resolve(model, settings)
        return
    values = {name: each.value for name, each in resolve(model, settings).items()}
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("device", ["CUDA0", "CPU"])
def test_hobbit_computes_prompts_on_the_gpu_and_shares_the_rest(device: str) -> None:
    """The mode cooperative does, where there is a GPU."""
    assert settings_of("hobbit", {"device": device}).get("mode") == (
        None if device == "CPU" else "cooperative"
    )


def test_the_price_itself_may_be_all_high(tmp_path: Path) -> None:
    given = {"hobbit.rule": "edgemoe", "hobbit.price": 0.0}
    assert resolve(_model(tmp_path, "none"), given)["price"].value == 0
