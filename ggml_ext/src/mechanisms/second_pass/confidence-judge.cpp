// SPDX-License-Identifier: MIT
#include "plan/batch-passes.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

// The largest probability of a softmax. NaN where a logit is NaN.
static double best_probability(const float * logits, size_t n) {
    const double best = *std::max_element(logits, logits + n);
    double       sum  = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += std::exp(double(logits[i]) - best);
    }
    return 1.0 / sum;
}

namespace {

// MoBiLE's confidence (III-A): a token is kept if its best probability is above the confidence of its sequence.
class confidence_judge final : public token_judge {
  public:
    explicit confidence_judge(const judge_options &) {}

    bool drafts(const score_thresholds & own) const override { return own.confidence > 0.0 && !own.all_high(); }

    bool keeps(const score_thresholds & own, const float * logits, size_t n_vocab) const override {
        return best_probability(logits, n_vocab) > own.confidence;
    }
};

const auto maker = registered_judge::of<confidence_judge>("confidence");

} // namespace

} // namespace hobbit
