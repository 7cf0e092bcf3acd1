// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"
#include "plan/precision-rule.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// An expert in one precision and the selections that it serves.
struct planned_use {
    expert_id            id;
    tier_id              tier;
    std::vector<int32_t> selections;
};

struct layer_plan {
    std::vector<planned_use> uses;       // in the order of experts
    std::vector<int32_t>     skipped;    // selections
    std::vector<precision>   precisions; // [selection], what serves it
};

// Changes the precisions of selections, and the experts that serve them; both are indexed by selection.
using plan_adjustment =
    std::function<void(const rule_input & in, std::vector<precision> & precisions, std::vector<int32_t> & served)>;

// Plans what serves each selection. An expert serves all tokens of the batch in the best precision that the rule gives
// any of them, or in a better one that is resident. An expert without a high version is low where the rule gives high,
// which REQUIRES a low pool. With `strict` each token gets exactly what the rule gives it as if
// nothing were resident, which is how quality is measured; nothing is adjusted then.
layer_plan plan_layer(precision_rule & rule, const rule_input & in, bool strict = false,
                      const plan_adjustment & adjust = nullptr);

// The weights of one token's experts, made to sum to 1; equal ones where they cannot be.
void normalize_weights(const float * weights, size_t n, double * out);

} // namespace hobbit
