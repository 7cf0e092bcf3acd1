// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <numeric>
#include <vector>

namespace hobbit {

namespace {

const rule_number
    nucleus_number("nucleus", "hobbit.nucleus", 1, "1", rule_number::finer::larger,
                   "Rule nucleus: a token keeps its best experts until their weights sum to this; 1: all high.");

// A token's best experts are high until their weights sum to its number; the others are skipped.
class nucleus_rule : public precision_rule {
  public:
    explicit nucleus_rule(const rule_options &) {}

  private:
    void decide_token(const rule_input & in, size_t first, precision * out) override {
        const auto    n       = size_t(in.routing.n_used);
        const float * weights = &in.routing.weights[first];
        const double  share   = in.thresholds[first / n][nucleus_number];
        const double  all     = std::accumulate(weights, weights + n, 0.0);
        double        sum     = 0.0; // weights of the experts ranked before
        for (const size_t i : by_weight(weights, n)) {
            out[i]  = sum == 0.0 || sum < share * all ? precision::high : precision::skip;
            sum    += weights[i];
        }
    }
};

bool never_low(const rule_numbers &) {
    return false;
}

const auto maker = registered_rule::of<nucleus_rule>("nucleus", { "(a token's best weights)", "hobbit.nucleus", false,
                                                                  -1.0, never_low });

} // namespace

} // namespace hobbit
