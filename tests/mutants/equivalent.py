# SPDX-License-Identifier: MIT
"""Sampled mutants that compute the same, and why."""

from __future__ import annotations

ORDER = "the orders 0, 1 and 2 become 0, 2 and 3"
UNIT = "a slot, and what several experts take, is never one byte"

EQUIVALENT: dict[str, str] = {
    "return t.size > 0 && t.ne[<0] > 0 && t.ne[1] > 0 && t.ne[2] > 0 && t.ne[2] <= INT32_MAX && -> 1": "a "
    "dimension of 0 is refused before",
    "return (e.is_protected ? PROTECTED : 0) + (e.is_duplicate ? DUPLICATE : <1 + keeps_quota); -> 2": ORDER,
    "return demand.slot_size[term_id::low] > <0 && (b.low_demand > 0.0 || demand.low_per_high > 0 || "
    "demand.n_absent > 0); -> 1": UNIT,
    'const double n_layers  = read(".block_count", <1); -> 2': "without the key either number is sound",
    "for spec, each in zip(specs, values, strict=<True): -> False": "another number is refused before",
    "shared[i].*setting = least[i] + (sum > <0 ? uint64_t(rest * weights[i] / sum) : 0); -> 1": UNIT,
    "for (size_t i = 0; i < least.size() && bound > <0; i++) { -> 1": "a bound of one byte is refused before",
    "uint64_t n_uses_ = <0; -> 1": "the order of the counts decides, and the first is above 0 all the same",
    "const uint64_t at_least = std::max(least_slots(d, term_id::low), d.n_absent > 0 ? left : <0); -> 1": (
        "the least is 1 or more"
    ),
    "memory.push_back(d.n_experts > <0 ? least_device_memory(device.rows, smallest) : 0); -> 1": "a layer "
    "with routed experts has two or more",
}
