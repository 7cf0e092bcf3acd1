// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

void score_experts(const float * weights, size_t n, const score_thresholds & thresholds, precision * out) {
    if (thresholds.all_high() || !ranks_experts(weights, n)) {
        std::fill(out, out + n, precision::high);
        return;
    }
    const double sum = std::accumulate(weights, weights + n, 0.0);

    double score = 0.0; // score of the first one, which is always high
    for (const size_t i : by_weight(weights, n)) {
        out[i]  = of_score(score, thresholds);
        score  += weights[i] / sum;
    }
}

namespace {

class gate_rule : public precision_rule {
  public:
    explicit gate_rule(const rule_options &) {}

    std::vector<precision> decide(const rule_input & in) override {
        const layer_routing &  routing = in.routing;
        std::vector<precision> out(routing.experts.size(), precision::high);
        for (int64_t t = 0; t < routing.n_tokens && !routing.weights.empty(); t++) {
            const int64_t first = t * routing.n_used;
            score_experts(&routing.weights[first], routing.n_used, in.thresholds[t], &out[first]);
        }
        return out;
    }
};

const auto maker = registered_rule::of<gate_rule>("gate", { "(t1 and t2)" });

} // namespace

} // namespace hobbit
