// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

static precision decide_one(double score, const score_thresholds & thresholds) {
    if (score <= thresholds.t1) {
        return precision::high;
    }
    // the sum may be rounded to a score above 1
    return thresholds.t2 >= 1.0 || score <= thresholds.t2 ? precision::low : precision::skip;
}

void score_experts(const float * weights, size_t n, const score_thresholds & thresholds, precision * out) {
    if (thresholds.all_high() || !ranks_experts(weights, n)) {
        std::fill(out, out + n, precision::high);
        return;
    }
    const double sum = std::accumulate(weights, weights + n, 0.0);

    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });

    double score = 0.0;
    for (size_t rank = 0; rank < n; rank++) {
        const size_t i  = order[rank];
        out[i]          = rank == 0 ? precision::high : decide_one(score, thresholds);
        score          += weights[i] / sum;
    }
}

namespace {

class gate_rule : public precision_rule {
  public:
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

} // namespace

std::unique_ptr<precision_rule> make_gate_rule(const rule_options &) {
    return std::make_unique<gate_rule>();
}

} // namespace hobbit
