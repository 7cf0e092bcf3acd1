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
    for (size_t i = 0; i < routing.experts.size() && in.has_high; i++) {
        const bool is_absent = !in.has_high({ routing.layer, uint32_t(routing.experts[i]) });
        plan.precisions[i]   = is_absent ? std::min(plan.precisions[i], precision::low) : plan.precisions[i];
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

} // namespace hobbit
