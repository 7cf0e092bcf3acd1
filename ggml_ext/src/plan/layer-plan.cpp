// SPDX-License-Identifier: MIT
#include "plan/layer-plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace hobbit {

// The best version among what the rule gives and what is resident.
static precision serve(precision given, expert_id id, const rule_input & in) {
    if (given == precision::high || in.is_resident(id, tier_id::high)) {
        return precision::high;
    }
    return in.has_low && in.is_resident(id, tier_id::low) ? precision::low : given;
}

// An expert serves the whole batch in one precision.
static void unite(const rule_input & in, std::vector<precision> & precisions) {
    const layer_routing & routing = in.routing;
    if (routing.n_tokens == 1) { // its experts are distinct
        for (size_t i = 0; i < routing.experts.size(); i++) {
            precisions[i] = serve(precisions[i], { routing.layer, uint32_t(routing.experts[i]) }, in);
        }
        return;
    }
    std::map<int32_t, precision> best; // [expert]
    for (size_t i = 0; i < routing.experts.size(); i++) {
        precision & b = best.emplace(routing.experts[i], precision::skip).first->second;
        b             = std::max(b, precisions[i]);
    }
    for (auto & [expert, given] : best) {
        given = serve(given, { routing.layer, uint32_t(expert) }, in);
    }
    for (size_t i = 0; i < routing.experts.size(); i++) {
        precisions[i] = best[routing.experts[i]];
    }
}

layer_plan plan_layer(precision_rule & rule, const rule_input & in, bool strict, const plan_adjustment & adjust) {
    const layer_routing & routing = in.routing;
    const residency       none    = [](expert_id, tier_id) { return false; };
    layer_plan            plan;
    plan.precisions = rule.decide({ routing, in.thresholds, strict ? none : in.is_resident, in.has_low });
    if (!in.has_low) {
        std::replace(plan.precisions.begin(), plan.precisions.end(), precision::low, precision::high);
    }
    for (size_t i = 0; i < routing.experts.size() && in.served; i++) {
        plan.precisions[i] = in.served({ routing.layer, uint32_t(routing.experts[i]) }, plan.precisions[i]);
    }
    std::vector<int32_t> served = routing.experts; // [selection]
    if (!strict) {
        unite(in, plan.precisions);
    }
    if (!strict && adjust) {
        adjust(in, plan.precisions, served);
    }

    std::map<std::pair<int32_t, tier_id>, planned_use> uses;
    for (size_t i = 0; i < routing.experts.size(); i++) {
        if (plan.precisions[i] == precision::skip) {
            plan.skipped.push_back(int32_t(i));
            continue;
        }
        const tier_id tier = tier_of(plan.precisions[i]);
        planned_use & use  = uses[{ served[i], tier }];
        use.id             = { routing.layer, uint32_t(served[i]) };
        use.tier           = tier;
        use.selections.push_back(int32_t(i));
    }
    for (auto & entry : uses) {
        plan.uses.push_back(std::move(entry.second));
    }
    return plan;
}

void normalize_weights(const float * weights, size_t n, double * out) {
    const double sum    = std::accumulate(weights, weights + n, 0.0);
    const bool   usable = ranks_experts(weights, n);
    for (size_t i = 0; i < n; i++) {
        out[i] = usable ? weights[i] / sum : 1.0 / double(n);
    }
}

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
            const uint32_t     sequence = sequences[i / routing.n_used];
            const expert_usage none     = { use.id, sequence, use.tier, 0, 0.0, uint32_t(routing.n_used) };
            expert_usage &     usage    = by_sequence.emplace(sequence, none).first->second;
            usage.n_tokens++;
            usage.weight += weights[i];
        }
        for (const auto & entry : by_sequence) {
            policy_.on_use(entry.second);
        }
    }
}

} // namespace hobbit
