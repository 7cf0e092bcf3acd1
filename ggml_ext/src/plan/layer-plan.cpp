// SPDX-License-Identifier: MIT
#include "plan/layer-plan.h"

#include "model/expert-index.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace hobbit {

static std::vector<precision> decide(const layer_routing & routing, const plan_rules & rules,
                                     std::mt19937_64 & generator) {
    std::vector<precision> worth(routing.experts.size(), PRECISION_HIGH);
    if (rules.random) {
        std::uniform_real_distribution<double> uniform;
        for (precision & w : worth) {
            const double u = uniform(generator);
            w = u < rules.thresholds.t1 ? PRECISION_HIGH : u < rules.thresholds.t2 ? PRECISION_LOW : PRECISION_SKIP;
        }
    } else if (!routing.weights.empty()) {
        for (int64_t t = 0; t < routing.n_tokens; t++) {
            const int64_t            first      = t * routing.n_used;
            const score_thresholds & thresholds = rules.by_token.empty() ? rules.thresholds : rules.by_token[t];
            score_experts(&routing.weights[first], routing.n_used, thresholds, &worth[first]);
        }
    }
    if (!rules.has_low) {
        std::replace(worth.begin(), worth.end(), PRECISION_LOW, PRECISION_HIGH);
    }
    return worth;
}

layer_plan plan_layer(const layer_routing & routing, const plan_rules & rules, const residency & is_resident,
                      std::mt19937_64 & generator) {
    layer_plan plan;
    plan.precisions = decide(routing, rules, generator);

    if (!rules.strict) {
        std::map<int32_t, precision> best;
        for (size_t i = 0; i < routing.experts.size(); i++) {
            precision & b = best.emplace(routing.experts[i], PRECISION_SKIP).first->second;
            b             = std::max(b, plan.precisions[i]);
        }
        for (auto & [expert, worth] : best) {
            const expert_id id  = { routing.layer, uint32_t(expert) };
            const bool      low = rules.has_low && is_resident(id, TIER_LOW);
            worth               = serve(worth, is_resident(id, TIER_HIGH), low);
        }
        for (size_t i = 0; i < routing.experts.size(); i++) {
            plan.precisions[i] = best[routing.experts[i]];
        }
    }

    std::map<std::pair<int32_t, uint32_t>, planned_use> uses;
    for (size_t i = 0; i < routing.experts.size(); i++) {
        if (plan.precisions[i] == PRECISION_SKIP) {
            plan.skipped.push_back(int32_t(i));
            continue;
        }
        const uint32_t tier = plan.precisions[i] == PRECISION_HIGH ? TIER_HIGH : TIER_LOW;
        planned_use &  use  = uses[{ routing.experts[i], tier }];
        use.id              = { routing.layer, uint32_t(routing.experts[i]) };
        use.tier            = tier;
        use.selections.push_back(int32_t(i));
    }
    for (auto & entry : uses) {
        plan.uses.push_back(std::move(entry.second));
    }
    return plan;
}

void normalize_weights(const float * weights, size_t n, double * out) {
    const double sum    = std::accumulate(weights, weights + n, 0.0);
    const bool   usable = sum > 0.0 && std::isfinite(sum);
    for (size_t i = 0; i < n; i++) {
        out[i] = usable ? weights[i] / sum : 1.0 / double(n);
    }
}

} // namespace hobbit
