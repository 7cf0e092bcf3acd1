// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

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

    std::vector<precision> decide(const rule_input & in) override {
        const layer_routing &  routing = in.routing;
        const auto             n_used  = size_t(routing.n_used);
        std::vector<precision> out(routing.experts.size(), precision::high);
        for (size_t first = 0; first < routing.weights.size(); first += n_used) {
            const float * weights = &routing.weights[first];
            const double  share   = in.thresholds[first / n_used][nucleus_number];
            if (share >= 1.0 || !ranks_experts(weights, n_used)) {
                continue;
            }
            double all = 0.0;
            for (size_t i = 0; i < n_used; i++) {
                all += weights[i];
            }
            double sum = 0.0; // weights of the experts ranked before
            for (const size_t i : by_weight(weights, n_used)) {
                out[first + i]  = sum == 0.0 || sum < share * all ? precision::high : precision::skip;
                sum            += weights[i];
            }
        }
        return out;
    }
};

bool never_low(const rule_numbers &) {
    return false;
}

const auto maker = registered_rule::of<nucleus_rule>("nucleus", { "(a token's best weights)", "hobbit.nucleus", false,
                                                                  true, -1.0, never_low });

} // namespace

} // namespace hobbit
