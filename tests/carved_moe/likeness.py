# SPDX-License-Identifier: MIT
"""How even the weights of a token's experts are in route traces: python likeness.py TRACE.csv ..."""

import sys
from pathlib import Path

import numpy as np

from pyhobbit.routing.trace import read_trace


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        trace = read_trace(path)
        counted = (
            trace.routes[trace.routes["counted"] != 0]["weight"].reshape(-1, trace.n_used).astype(np.float64)
        )
        weights = counted / counted.sum(1, keepdims=True)
        entropy = -(weights * np.log(np.maximum(weights, 1e-12))).sum(1) / np.log(trace.n_used)
        low, median, high = np.percentile(entropy, (10, 50, 90))
        best = weights.max(1).mean()
        print(
            f"{path.name}: entropy {median:.3f} of the most ({low:.3f} to {high:.3f}), best weight {best:.2f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
