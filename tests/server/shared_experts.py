# SPDX-License-Identifier: MIT
"""Counts what a server's clients ask of the disk together, by arithmetic on a recorded routing.

    python tests/server/shared_experts.py TRACE --layers 12 --slots 10.4 43 --expert-bytes 2654208

A pass computes one token of each client. Each client decodes the trace from another token on, an eighth of it
apart. slots: experts of a layer that the pools hold, on average.  distinct: those of a layer that a pass
needs.  least: MB per token where every slot holds an expert that the pass needs; the policies are replayed.
token/s: what a disk of --bandwidth allows with these bytes, whatever computing takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.harness.table import markdown
from bench.harness.trace import MoeShape, Routing, lay_over
from pyhobbit.routing.trace import BELADY, ROUTE, Simulation, read_trace, simulate

MOST, WARM = 8, 24  # clients, and passes before those that count
POLICIES = ("echo", BELADY)


def passes(routing: Routing, n_clients: int) -> NDArray[np.void]:
    """Routes [pass, layer, client, rank]."""
    n, n_layers, n_used = routing.experts.shape
    rows = (np.arange(n)[:, None] + np.arange(n_clients) * n // MOST) % n
    routes = np.zeros((n, n_layers, n_clients, n_used), ROUTE)
    routes["sequence"] = np.arange(n_clients)[:, None]
    routes["token"] = np.arange(n)[:, None, None, None]
    routes["layer"] = np.arange(n_layers)[:, None, None]
    routes["expert"] = routing.experts[rows].transpose(0, 2, 1, 3)
    routes["weight"] = routing.weights[rows].transpose(0, 2, 1, 3)
    routes["counted"] = np.arange(n)[:, None, None, None] >= WARM
    return routes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--slots", type=float, nargs="+", required=True)
    parser.add_argument("--expert-bytes", type=int, required=True)
    parser.add_argument("--used", type=int, default=8, help="experts of a token")
    parser.add_argument("--bandwidth", type=float, default=1.4e9, help="bytes per second")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    routing = lay_over(trace, MoeShape(args.layers, trace.n_experts, args.used))
    table = []
    for n_clients in (1, 2, 4, MOST):
        routes = passes(routing, n_clients)
        asked = routes["expert"].reshape(-1, n_clients * args.used)
        distinct = float(np.mean([np.unique(layer).size for layer in asked]))
        for slots in args.slots:
            loads = {"least": args.layers * max(0.0, distinct - slots) / n_clients}
            for policy in POLICIES:
                pools = Simulation(
                    args.layers, trace.n_experts, args.used, round(slots * args.layers),
                    policy=policy, floors=policy != BELADY,
                )  # fmt: skip
                loads[policy] = simulate(routes.ravel(), pools).misses_per_token
            row = {"clients": str(n_clients), "slots": f"{slots:g}", "distinct": f"{distinct:.1f}"}
            row |= {f"{name}, MB/token": f"{n * args.expert_bytes / 1e6:.1f}" for name, n in loads.items()}
            row |= {
                f"{name}, token/s": f"{args.bandwidth / (n * args.expert_bytes):.1f}" if n else ""
                for name, n in loads.items()
            }
            table.append(row)
    print("\n".join(markdown(table)))


if __name__ == "__main__":
    main()
