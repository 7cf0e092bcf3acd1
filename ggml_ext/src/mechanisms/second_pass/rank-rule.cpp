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

  private:
    void decide_token(const rule_input & in, size_t first, precision * out) override {
        const auto                n     = size_t(in.routing.n_used);
        const std::vector<size_t> order = by_weight(&in.routing.weights[first], n);
        for (size_t i = 1; i < n; i++) {
            out[order[i]] = of_score((double(i) + 0.5) / double(n), in.thresholds[first / n]);
        }
    }
};

const auto maker = registered_rule::of<rank_rule>("rank", threshold_traits("(a token's best half)", 0.5));

} // namespace

} // namespace hobbit
