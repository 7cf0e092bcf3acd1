// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace hobbit {

const rule_number t1_number("gate", "hobbit.t1", 1, "1", rule_number::finer::larger,
                            "High precision until the weights sum to t1, then the low tier; 1: all high.", "hobbit.t2");
const rule_number t2_number("gate", "hobbit.t2", 1, "1", rule_number::finer::larger,
                            "Low tier from t1 to t2; experts beyond t2 are skipped.");

static bool asks_for_low(const rule_numbers & t) {
    return t[t1_number] < 1.0 && t[t2_number] > t[t1_number];
}

static double low_demand(const rule_numbers & t) {
    return 1.0 - t[t1_number];
}

// From this precision on, a low tier costs less than skipping: docs/quality.md has the divergences.
static constexpr double FINE_BITS = 4.0;

static rule_numbers of_bits(double low_bits, bool is_fast) {
    rule_numbers t;
    t[t1_number] = is_fast && low_bits >= FINE_BITS ? 0.0 : 0.6;
    t[t2_number] = is_fast && low_bits < FINE_BITS ? 0.9 : 1.0;
    return t;
}

rule_traits threshold_traits(const char * help, double own_value) {
    return { help, "hobbit.t1 hobbit.t2", false, own_value, asks_for_low, low_demand, of_bits };
}

precision of_score(double score, const rule_numbers & thresholds) {
    if (score <= thresholds[t1_number]) {
        return precision::high;
    }
    // the sum may be rounded to a score above 1
    const double t2 = thresholds[t2_number];
    return t2 >= 1.0 || score <= t2 ? precision::low : precision::skip;
}

namespace {

// Eq. 2 of HOBBIT. A token's experts are ranked by weight. An expert's score is the sum of the normalised weights
// ranked before it: up to t1 the expert is high, up to t2 low, and above t2 it is skipped. The first one is always
// high.
class gate_rule : public precision_rule {
  public:
    explicit gate_rule(const rule_options &) {}

  private:
    void decide_token(const rule_input & in, size_t first, precision * out) override {
        const auto    n       = size_t(in.routing.n_used);
        const float * weights = &in.routing.weights[first];
        const double  sum     = std::accumulate(weights, weights + n, 0.0);
        double        score   = 0.0;
        for (const size_t i : by_weight(weights, n)) {
            out[i]  = of_score(score, in.thresholds[first / n]);
            score  += weights[i] / sum;
        }
    }
};

// The baseline that Eq. 2 is compared with: t1 is the share of high precision, t2 the share of high or low precision.
class random_rule : public precision_rule {
  public:
    explicit random_rule(const rule_options &) {}

  private:
    void decide_token(const rule_input & in, size_t first, precision * out) override {
        const auto                             n      = size_t(in.routing.n_used);
        const rule_numbers &                   shares = in.thresholds[first / n];
        std::uniform_real_distribution<double> uniform;
        std::generate_n(out, n, [&] {
            const double u = uniform(generator_);
            return u < shares[t1_number] ? precision::high : u < shares[t2_number] ? precision::low : precision::skip;
        });
    }

    std::mt19937_64 generator_;
};

const auto gate   = registered_rule::of<gate_rule>("gate", threshold_traits("(t1 and t2)"));
const auto random = registered_rule::of<random_rule>("random", threshold_traits(""));

} // namespace

} // namespace hobbit
