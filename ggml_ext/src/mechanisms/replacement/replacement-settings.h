// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/stats.h"
#include "model/expert.h"
#include "plan/precision-rule.h"

#include <cstdint>
#include <vector>

namespace hobbit {

inline const registered_setting degrade_setting(
    { "hobbit.degrade", "degrade", HOBBIT_TYPE_FLAG, 0, 1, "0", nullptr, nullptr, nullptr, false, false, nullptr,
      "Load only the best of a token's missing experts; resident ones replace the others (DAOP). Approximate." });

inline const registered_counter
    selections_replaced("selections_replaced", "replaced_selections_total",
                        "Expert selections that a resident expert served in place of a missing one");

// DAOP's graceful degradation (DATE 2025, section IV-C): of a token's experts that are missing, only the best is
// fetched. Each other one is replaced by the best expert, by the router's ranking, that is resident and not the
// token's already. It stays if there is none, or if another token has the expert fetched.
//
// Returns the experts that serve the selections, and changes the precisions of those that are replaced. The weight
// remains that of the expert replaced, where the paper normalises anew. `ranking`: all experts as the router ranked
// them, [token][expert]. Pure.
std::vector<int32_t> replace_missing(const rule_input & in, const std::vector<int32_t> & ranking,
                                     std::vector<precision> & precisions);

} // namespace hobbit
