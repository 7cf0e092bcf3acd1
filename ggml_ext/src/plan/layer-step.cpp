// SPDX-License-Identifier: MIT
#include "plan/layer-step.h"

#include <algorithm>
#include <map>

namespace hobbit {

static step_counts count(const layer_plan & plan, const residency & is_resident, const layer_step::filter & is_counted,
                         const layer_step::novelty & is_new) {
    const auto n_counted = [&](const std::vector<int32_t> & selections) {
        return is_counted ? uint64_t(std::count_if(selections.begin(), selections.end(), is_counted))
                          : selections.size();
    };
    const auto is_first = [&](const planned_use & use) {
        return !is_new || std::any_of(use.selections.begin(), use.selections.end(),
                                      [&](int32_t i) { return is_new(i, plan.precisions[size_t(i)]); });
    };
    step_counts counts;
    counts.skipped = n_counted(plan.skipped);
    for (const planned_use & use : plan.uses) {
        const uint64_t n             = n_counted(use.selections);
        counts.selections[use.tier] += n;
        const bool is_use            = n > 0 && is_first(use);
        counts.uses[use.tier]       += is_use;
        counts.misses[use.tier]     += is_use && !is_resident(use.id, use.tier);
    }
    return counts;
}

layer_plan layer_step::run(const rule_input & in, const std::vector<uint32_t> & sequences, step_counts & counts,
                           const filter & is_counted, const novelty & is_new, const plan_adjustment & adjust) {
    layer_plan plan = plan_layer(rule_, in, strict_, adjust);
    record(plan, in.routing, sequences, is_new);
    counts = count(plan, in.is_resident, is_counted, is_new);
    return plan;
}

// Tells the policy of each expert's use by each sequence.
void layer_step::record(const layer_plan & plan, const layer_routing & routing, const std::vector<uint32_t> & sequences,
                        const novelty & is_new) {
    std::vector<double> weights(routing.experts.size(), 1.0 / double(routing.n_used));
    for (int64_t t = 0; t < routing.n_tokens && !routing.weights.empty(); t++) {
        normalize_weights(&routing.weights[t * routing.n_used], routing.n_used, &weights[t * routing.n_used]);
    }
    for (const planned_use & use : plan.uses) {
        std::map<uint32_t, expert_usage> by_sequence;
        for (const int32_t i : use.selections) {
            if (is_new && !is_new(i, precision::low)) {
                continue; // it has heard of this use, maybe in another precision
            }
            const uint32_t sequence = sequences[i / routing.n_used];
            expert_usage & usage =
                by_sequence
                    .emplace(sequence, expert_usage{ use.id, sequence, use.tier, 0, 0.0, uint32_t(routing.n_used) })
                    .first->second;
            usage.n_tokens++;
            usage.weight += weights[i];
        }
        for (const auto & entry : by_sequence) {
            policy_.on_use(entry.second);
        }
    }
}

} // namespace hobbit
