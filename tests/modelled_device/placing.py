# SPDX-License-Identifier: MIT
"""The program's own choice of a placement in virtual time: placing.py MODEL BYTES (test_modelled.py).

BYTES: device memory for experts. Writes the layers whose experts the CPU gets, or null for the cache.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from decode import Device

from bench.harness import trace
from pyhobbit.engine import placement
from pyhobbit.native.paths import LIB_DIR
from pyhobbit.settings.config import CacheConfig, EngineConfig, SamplingConfig


class Drawn:
    """A sampler, since there are no logits."""

    def __init__(self, config: SamplingConfig, model: Any) -> None:
        self._random, self._n = np.random.default_rng(config.seed), model.n_vocab()

    def sample(self, _context: object) -> int:
        return int(self._random.integers(self._n))

    def close(self) -> None:
        """Frees nothing."""


def main() -> None:
    """Raises HobbitError."""
    model, device = Path(sys.argv[1]), Device(LIB_DIR)
    shape = trace.moe_shape(model)
    experts = trace.seeded_routing(shape, 256)
    device.route(experts, np.full(experts.shape, 1 / shape.n_used, np.float32), shape.n_experts)
    changed: Any = placement
    changed._now, changed.Sampler = (lambda: device.report()["now"] / 1e9), Drawn
    name = dict(word.split("=") for word in device.settings.split())["name"]
    cache = CacheConfig(device=f"{name}0", device_memory=int(sys.argv[2]))
    config = EngineConfig(cache, n_ctx=256, n_batch=64, n_threads=1)
    print(json.dumps(placement.choose(model, config).n_cpu))


if __name__ == "__main__":
    main()
