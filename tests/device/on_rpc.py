# SPDX-License-Identifier: MIT
"""Runs with the experts on a device behind ggml's RPC server.

That device is the CPU, with memory of its own: it computes as the CPU does, bit for bit.
"""

from pathlib import Path

import logits
import models
import numpy as np
from exactness import SHORT_PLANS
from logits import Override, Result

CHAT = ("-p", "def read", "-n", 12, "--temp", 0, "--ctx", 256)
"""Arguments of a chat whose text is compared."""


def run(model: Path, rpc: str, overrides: dict[str, Override], gpu_layers: int = 0) -> Result:
    overrides = {"hobbit.device": "RPC0"} | overrides
    return logits.run(models.lib_dir(), model, SHORT_PLANS, overrides, gpu_layers=gpu_layers, rpc=rpc)


def assert_same(result: Result, reference: Result) -> None:
    for name, wanted in reference.logits.items():
        np.testing.assert_array_equal(result.logits[name], wanted, name)
