# SPDX-License-Identifier: MIT
"""A trained model's calibration for a model of random weights, which has no quality to measure."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness.trace import moe_shape
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import model_parts, read_model_file
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration

_NAMES = ("t1", "t2", "price", "gate.low_share", "price.low_share", "low_costs", "skip_costs")


def carry_over(source: Path, model: Path, sidecar: Path) -> tuple[float, float]:
    """Writes a calibration beside `model` with price, costs and low shares of `source`; returns its t1, t2.

    The costs are those at the same relative depth, on a line between neighbouring layers. The price, which is
    per expert, is divided by how many times more experts a token uses, so that it stays the same per token.
    `source` must lie beside its model, which knows how many it uses. Raises HobbitError.
    """
    if not source.exists():
        raise HobbitError(f"{source} does not exist; pyhobbit calibrate makes such a file beside a model")
    keys = {key: entry.value() for key, entry in read_gguf(source).metadata.items()}
    if missing := [name for name in _NAMES if f"hobbit.{name}" not in keys]:
        raise HobbitError(f"{source} has no hobbit.{missing[0]}; calibrate that model with both rules")
    t1, t2, price, gate_share, price_share, *costs = (keys[f"hobbit.{name}"] for name in _NAMES)
    if any(math.isinf(cost) for of in costs for cost in of):
        raise HobbitError("a calibration with infinite costs cannot be carried over")
    own = source.with_name(source.name.replace(".calibration.", "."))
    if not own.exists() or own == source:
        raise HobbitError(f"{source} is not beside its model; leave it where pyhobbit calibrate wrote it")
    file = read_model_file(model, sidecar)
    places = np.linspace(0, len(costs[0]) - 1, len(file.blocks))
    low, skip = (tuple(np.interp(places, np.arange(len(of)), of).tolist()) for of in costs)
    model_bytes = sum(part.size for part in model_parts(model))
    low_bytes = next(tier.n_bytes for tier in file.tiers if tier.name == "low")
    calibration = Calibration(model_bytes, low_bytes, t1, t2, rule="price", costs=Costs(low, skip))
    price *= moe_shape(own).n_used / moe_shape(model).n_used
    shares = {"low_share": price_share, "found": {"gate.low_share": gate_share}}
    replace(calibration, price=price, **shares).write(model)
    return t1, t2
