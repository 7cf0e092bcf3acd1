# SPDX-License-Identifier: MIT
"""Prints the plan of each layer, token by token: the experts, their gate weights and the precision of each.

python tests/print_plan.py MODEL [--prompt TEXT] [--tokens N] [--pools SIZE] [--t1 F] [--t2 F]

A line is `token 3, layer 0: 5 0.61 high, 2 0.39 low`. Change print_layer() to see more of an event.
"""

import argparse
from pathlib import Path
from typing import Any

from pyhobbit import CacheConfig, Engine, EngineConfig, SamplingConfig
from pyhobbit.native.ffi import ffi
from pyhobbit.routing.observe import LayerEvent, layer_event, observed
from pyhobbit.settings.config import parse_size

PRECISIONS = ("skipped", "low", "high")


def print_layer(event: LayerEvent) -> None:
    """Prints a line for each token of a layer's event."""
    rows = zip(event.positions, event.experts, observed(event.weights), event.precisions, strict=True)
    for position, *uses in rows:
        texts = [f"{e} {w:.2f} {PRECISIONS[p]}" for e, w, p in zip(*uses, strict=True)]
        print(f"token {position}, layer {event.layer}: {', '.join(texts)}")


def main() -> None:
    """Reads the command line, generates and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", default="def read_file(path):")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--pools", type=parse_size, default=parse_size("6M"))
    parser.add_argument("--t1", type=float)
    parser.add_argument("--t2", type=float)
    args = parser.parse_args()

    @ffi.callback("hobbit_observer")
    def receive(event: Any, _user_data: object) -> None:
        print_layer(layer_event(event))

    cache = CacheConfig(pools=args.pools, t1=args.t1, t2=args.t2)
    with Engine(args.model, EngineConfig(cache=cache, n_ctx=256)) as engine:
        engine._opened().cache.set_observer(receive)
        for _ in engine.generate(args.prompt, args.tokens, SamplingConfig(temp=0)):
            pass


if __name__ == "__main__":
    main()
