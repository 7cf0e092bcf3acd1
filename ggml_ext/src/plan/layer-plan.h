// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"
#include "plan/precision-rule.h"
#include "policy/cache-policy.h"

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
// any of them, or in a better one that is resident, as far as the file serves it. With `strict` each token gets what
// the rule gives it as if nothing were resident, which is how quality is measured; nothing is adjusted then.
layer_plan plan_layer(precision_rule & rule, const rule_input & in, bool strict = false,
                      const plan_adjustment & adjust = nullptr);

// The weights of one token's experts, made to sum to 1; equal ones where they cannot be.
void normalize_weights(const float * weights, size_t n, double * out);

// Counts of a step, before anything is loaded.
struct step_counts {
    per_tier<uint64_t> selections = {}; // [tier] that serves them
    per_tier<uint64_t> uses       = {}; // uses of an expert, each by any number of selections
    per_tier<uint64_t> misses     = {}; // misses among the uses
    uint64_t           skipped    = 0;  // selections
};

// The common part of engine and simulator for one layer and batch, before any expert is loaded: the rule plans, the
// policy hears of every use, and hits and misses are counted. Thread-safety: none.
class layer_step {
  public:
    // Both must outlive the object. `strict`: see plan_layer.
    layer_step(precision_rule & rule, cache_policy & policy, bool strict = false) :
        rule_(rule), policy_(policy), strict_(strict) {}

    // Returns true if a selection is counted.
    using filter = std::function<bool(int32_t selection)>;

    // Returns true if a selection's expert was not yet used for the token in this precision, or in a better one.
    using novelty = std::function<bool(int32_t selection, precision served)>;

    // `sequences` [token] are as the policy numbers them. `counts` is overwritten; without a filter every selection
    // counts. Uses and misses count what is new in its precision, and the policy hears of what is new in any; without
    // `is_new` everything is. The uses come in the order of experts.
    layer_plan run(const rule_input & in, const std::vector<uint32_t> & sequences, step_counts & counts,
                   const filter & is_counted = nullptr, const novelty & is_new = nullptr,
                   const plan_adjustment & adjust = nullptr);

  private:
    void record(const layer_plan & plan, const layer_routing & routing, const std::vector<uint32_t> & sequences,
                const novelty & is_new);

    precision_rule & rule_;
    cache_policy &   policy_;
    const bool       strict_;
};

} // namespace hobbit
