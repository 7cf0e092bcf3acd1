# SPDX-License-Identifier: MIT
"""Calibrations of models of random weights, which have no quality to measure."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.analysis.figures import uses_of
from bench.harness.routing import moe_shape
from pyhobbit.errors import HobbitError
from pyhobbit.model.gguf_file import read_gguf
from pyhobbit.model.model_file import model_parts, read_model_file
from pyhobbit.quality.evaluate import Costs
from pyhobbit.quality.stored import Calibration


def carry_over(source: Path, model: Path, sidecar: Path) -> tuple[float, float]:
    """Writes a calibration beside `model` with price, costs and low shares of `source`; returns its t1, t2.

    The costs are those at the same relative depth, on a line between neighbouring layers. The price, which is
    per expert, is divided by how many times more experts a token uses, so that it stays the same per token.
    `source` must lie beside its model, which knows how many it uses. Raises HobbitError.
    """
    if not source.exists():
        raise HobbitError(f"{source} does not exist; pyhobbit calibrate makes such a file beside a model")
    keys = {key: entry.value() for key, entry in read_gguf(source).metadata.items()}
    names = ("t1", "t2", "price", "gate.low_share", "price.low_share", "low_costs", "skip_costs")
    wanted = tuple(f"hobbit.{name}" for name in names)
    if missing := [key for key in wanted if key not in keys]:
        raise HobbitError(f"{source} has no {missing[0]}; calibrate that model with both rules")
    t1, t2, price, gate_share, price_share, low, skip = (keys[key] for key in wanted)
    file = read_model_file(model, sidecar)
    costs = Costs(stretched(low, len(file.blocks)), stretched(skip, len(file.blocks)))
    n_times = moe_shape(model).n_used / moe_shape(_model_of(source)).n_used
    calibration = Calibration(
        model_bytes=sum(part.size for part in model_parts(model)),
        low_bytes=next(tier.n_bytes for tier in file.tiers if tier.name == "low"),
        t1=t1,
        t2=t2,
        low_share=price_share,
        rule="price",
        price=price / n_times,
        costs=costs,
        found={"gate.low_share": gate_share},
    )
    calibration.write(model)
    return t1, t2


def placed(model: Path, link: Path, experts: NDArray[np.int32]) -> Path:
    """Makes a link to the model, with a calibration that counts these uses, [tokens, layers, used].

    Every expert counts once more, so that all have their order, and the pool is full before the first token.
    Raises HobbitError.
    """
    if not len(experts):
        raise HobbitError("the trace has no tokens beside those that are measured; give fewer with --tokens")
    uses = 1 + uses_of(experts, moe_shape(model).n_experts)
    link.symlink_to(model)
    size = sum(part.size for part in model_parts(link))
    Calibration(size, expert_uses=tuple(uses.ravel().tolist())).write(link)
    return link


def _model_of(calibration: Path) -> Path:
    model = calibration.with_name(calibration.name.replace(".calibration.", "."))
    if not model.exists() or model == calibration:
        raise HobbitError(
            f"{calibration} is not beside its model; leave it where pyhobbit calibrate wrote it"
        )
    return model


def stretched(costs: list[float], n_layers: int) -> tuple[float, ...]:
    """Costs of layers for another number of layers."""
    if any(math.isinf(cost) for cost in costs):
        raise HobbitError("a calibration with infinite costs cannot be carried over")
    places = np.linspace(0, len(costs) - 1, n_layers)
    return tuple(np.interp(places, np.arange(len(costs)), costs).tolist())
