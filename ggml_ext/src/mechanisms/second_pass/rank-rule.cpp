// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

namespace hobbit {

namespace {

// MoBiLE's little model (III-A): of a token's K experts the first K / 2, whatever their weights. The score of the i-th
// one, counted from 0, is (i + 1/2) / K, so that t1 = t2 = 0.5 skips the other half and t2 = 1 makes it low. As in Eq.
// 2 the first expert is always high, and all are if the weights do not rank them.
class rank_rule : public precision_rule {
  public:
    explicit rank_rule(const rule_options &) {}

    std::vector<precision> decide(const rule_input & in) override {
        const layer_routing &  routing = in.routing;
        const auto             n_used  = size_t(routing.n_used);
        std::vector<precision> out(routing.experts.size(), precision::high);
        for (int64_t t = 0; t < routing.n_tokens && !routing.weights.empty(); t++) {
            const size_t  first   = size_t(t) * n_used;
            const float * weights = &routing.weights[first];
            if (in.thresholds[t].all_high() || !ranks_experts(weights, n_used)) {
                continue;
            }
            const std::vector<size_t> order = by_weight(weights, n_used);
            for (size_t i = 1; i < n_used; i++) {
                out[first + order[i]] = of_score((double(i) + 0.5) / double(n_used), in.thresholds[t]);
            }
        }
        return out;
    }
};

const auto maker = registered_rule::of<rank_rule>("rank", threshold_traits("(a token's best half)", 0.5));

} // namespace

} // namespace hobbit
