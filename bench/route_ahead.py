# SPDX-License-Identifier: MIT
"""What route-ahead costs: each layer uses the experts that its router chose N layers earlier.

Other engines decode so, to know a layer's experts before the layer runs. Its own weights stay. The price is
measured on a torch copy of a trained model, beside that of the price rule, which loads fewer bytes.

    python bench/route_ahead.py tests/tiny_moe/model
"""

from __future__ import annotations

import torch
from cached_rules import ALL_HIGH, Policy, price
from many_experts import Copy, Result, Routing, TwoTierMoe, add_copy_options, halves, measure, measure_costs
from torch import Tensor

from pyhobbit.bench.script import option_parser, table_head

PRICES = (1e-4, 3e-4, 1e-3)


class RouteAhead:
    """Replaces the routing of each layer from number `ahead` on by that of the input of an earlier one."""

    def __init__(self, moes: list[TwoTierMoe], ahead: int) -> None:
        self.moes, self.ahead = moes, ahead
        self.inputs: list[Tensor] = []
        self.n_right = self.n_uses = 0
        self.routes = [moe.moe.route for moe in moes]
        for i, moe in enumerate(moes):
            moe.moe.route = lambda x, layer=i: self.route(layer, x)

    def remove(self) -> None:
        for moe, route in zip(self.moes, self.routes, strict=True):
            moe.moe.route = route

    def route(self, layer: int, x: Tensor) -> Routing:
        if layer == 0:
            self.inputs.clear()
        self.inputs.append(x)
        own = self.routes[layer](x)
        if layer < self.ahead:
            return own
        ids = self.routes[layer](self.inputs[layer - self.ahead]).ids
        weights = own.probs.gather(-1, ids)
        self.n_right += (ids[:, :, None] == own.ids[:, None, :]).sum().item()
        self.n_uses += ids.numel()
        return Routing(own.probs, ids, weights / weights.sum(-1, keepdim=True))


def row(name: str, right: float | None, result: Result) -> str:
    named = f"{right:.1%}" if right is not None else ""
    return f"| {name} | {named} | {result.share:.3f} | {result.kl:.4f} | {result.top1:.1%} |"


def main() -> None:
    parser = option_parser(__doc__)
    add_copy_options(parser)
    parser.add_argument("--chunks", type=int, default=6, help="of 512 tokens")
    parser.add_argument("--ahead", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    copy = Copy(args.model, args.high, args.low)
    fitted, chunks = halves(copy, args.model, args.chunks)
    reference = copy.logits(chunks, Policy(ALL_HIGH))
    print(table_head(("rule", "the router agrees", "bytes of all high", "KL", "same top-1")))
    for ahead in args.ahead:
        routes = RouteAhead(copy.moes, ahead)
        result = measure(copy, chunks, reference, Policy(ALL_HIGH))
        routes.remove()
        print(row(f"route-ahead by {ahead}", routes.n_right / routes.n_uses, result), flush=True)
    costs = measure_costs(copy, fitted)
    for value in PRICES:
        result = measure(copy, chunks, reference, Policy(price(value, costs, copy.low_bytes)))
        print(row(f"price {value:g}", None, result), flush=True)


if __name__ == "__main__":
    main()
