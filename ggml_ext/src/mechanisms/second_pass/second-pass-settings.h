// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/stats.h"
#include "plan/precision-rule.h"

namespace hobbit {

inline const rule_number
    confidence_number("", "hobbit.confidence", 1, "0", rule_number::finer::neither,
                      "Tokens whose best probability is not above this are computed again, all high; 0: none are.");

inline const bool counts_second_passes =
    register_counter("tokens_repeated", "repeated_tokens_total",
                     "Tokens that were computed again in high precision, because the first pass was unsure of them");

inline const bool is_mobile =
    register_paper({ "mobile", "nothing else", "rule=rank confidence=0.7 policy=lru prefetch=0" });

} // namespace hobbit
