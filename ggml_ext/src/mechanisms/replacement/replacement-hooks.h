// SPDX-License-Identifier: MIT
#pragma once

#include "plan/precision-rule.h"

#include <cstdint>
#include <vector>

namespace hobbit {

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
