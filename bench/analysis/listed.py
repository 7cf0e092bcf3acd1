# SPDX-License-Identifier: MIT
"""The papers' tables and figures: the part of the report that makes each, and what the paper shows."""

from collections.abc import Mapping

_ON_GPU = "it needs a GPU: python -m bench.compare --device"
_TASKS = "it needs tasks: llama-perplexity scores some, with a setting by --override-kv"

LISTED: Mapping[str, tuple[str, str]] = {
    "HOBBIT Fig. 3a": ("systems", "loading takes 85.5 and 94.5 % of a layer without a cache"),
    "HOBBIT Fig. 3b": ("skipping", "10 % skipped cost more than 1 % perplexity"),
    "HOBBIT Fig. 5a": ("routing", "r 0.99"),
    "HOBBIT Fig. 5b": ("routing", "67 % high, 30 % low, 3 % skipped for Mixtral-8x7B"),
    "HOBBIT Fig. 7a": ("routing", "near 1 for the next layer of Mixtral-8x7B"),
    "HOBBIT Fig. 7b": ("routing", "the best expert: 96, 90 and 90 % for 1, 2 and 3 layers ahead"),
    "HOBBIT Fig. 10a": ("routing", "above chance in all layers of Mixtral-8x7B"),
    "HOBBIT Fig. 10b": ("routing", "each sequence prefers other experts"),
    "HOBBIT Fig. 11a": ("routing", "often used experts are not always those used in high precision"),
    "HOBBIT Fig. 11b": ("routing", "a miss of a high version costs more than one of a low version"),
    "HOBBIT Fig. 14": ("stock", "13.0 (Mixtral), 18.9 times (Phi) llama.cpp; prefill 0.21, 0.20 of its time"),
    "HOBBIT Fig. 15": ("", _ON_GPU),
    "HOBBIT Fig. 16": ("systems", "1.19 to 1.57 times by Eq. 2"),
    "HOBBIT Fig. 17a": ("routing", "stacked stays constant"),
    "HOBBIT Fig. 17b": ("prefetch", "1.01 times all high (Mixtral), 1.05 mixed; prefill 10 % sooner"),
    "HOBBIT Fig. 18a": ("routing", "penalty 4.7 to 8.7 % below LRU's"),
    "HOBBIT Fig. 18b": ("routing", "4.5 % more hits"),
    "HOBBIT Table 3": ("", _TASKS),
    "EdgeMoE Fig. 4": ("routing", "20 % of the paths carry 99 % of the tokens (Switch, top-1)"),
    "EdgeMoE Fig. 6": ("types", "all experts in INT4 cost 1.30 to 1.44 %, in INT2 5.82 % (SAMsum)"),
    "EdgeMoE Fig. 7a": ("widths", "one expert in INT2 costs 0.44 %, another one 0.59 %"),
    "EdgeMoE Fig. 8": ("routing", "87 % for one path"),
    "EdgeMoE Fig. 11": ("systems", "2.6 to 3.3 times loading on demand"),
    "EdgeMoE Fig. 14": ("routing", "the most hits of five policies"),
    "EdgeMoE Fig. 16": ("memory", "faster with more memory, and than IO-QEXP at each"),
    "EdgeMoE Fig. 17": ("widths", "smaller and faster with more loss"),
    "MoBiLE Table II": ("systems", "1.72 and 1.57 times; GSM8K 64.1 to 60.8 and 51.5 to 44.8 %"),
    "MoBiLE Fig. 5": ("confidence", "gamma 0, 0.5, 0.7, 0.8: 0, 10, 21, 27 % twice, 1.85 to 1.54 times"),
    "Twiddler Fig. 4": ("", _ON_GPU),
    "Twiddler Fig. 5": ("prompts", "1.07 times DeepSpeed-MII, 1.17 times mixtral-offloading"),
    "Twiddler Fig. 6": ("beams", "11.57 times llama.cpp, 4 to 16 beams"),
    "Twiddler Fig. 7": ("", f"{_ON_GPU}; pyhobbit inspect prints the latencies there"),
    "Twiddler Fig. 8": ("routing", "22 % placed: 25.2, 21.9, 18.7 %; 49 % placed: 53.0, 48.8, 44.6 %"),
    "DAOP Table I": ("", _ON_GPU),
    "DAOP Table II": ("answers", "90.1, 90.4 and 91.7 % (C4, MATH, GSM8K) for Mixtral-8x7B"),
    "DAOP Table V": ("", _TASKS),
    "DAOP Table VI": ("", _TASKS),
    "DAOP Fig. 4": ("routing", ""),
    "DAOP Fig. 5": ("routing", "84.1 % one layer ahead"),
    "DAOP Fig. 9": ("", _ON_GPU),
}
"""Figures by name: part and what the paper shows, or "" and why no part makes it."""
