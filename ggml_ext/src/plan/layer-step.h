// SPDX-License-Identifier: MIT
#pragma once

#include "plan/layer-plan.h"
#include "policy/cache-policy.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

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
