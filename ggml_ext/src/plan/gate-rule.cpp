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

rule_traits threshold_traits(const char * help, double own_value, bool is_predictable) {
    return { help, "hobbit.t1 hobbit.t2", false, is_predictable, own_value, asks_for_low, low_demand, of_bits };
}

precision of_score(double score, const rule_numbers & thresholds) {
    if (score <= thresholds[t1_number]) {
        return precision::high;
    }
    // the sum may be rounded to a score above 1
    const double t2 = thresholds[t2_number];
    return t2 >= 1.0 || score <= t2 ? precision::low : precision::skip;
}

void score_experts(const float * weights, size_t n, const rule_numbers & thresholds, precision * out) {
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

// The baseline that Eq. 2 is compared with: t1 is the share of high precision, t2 the share of high or low precision.
class random_rule : public precision_rule {
  public:
    explicit random_rule(const rule_options &) {}

    std::vector<precision> decide(const rule_input & in) override {
        std::uniform_real_distribution<double> uniform;
        std::vector<precision>                 out;
        for (size_t i = 0; i < in.routing.experts.size(); i++) {
            const rule_numbers & shares = in.thresholds[i / size_t(in.routing.n_used)];
            const double         u      = uniform(generator_);
            out.push_back(u < shares[t1_number]   ? precision::high
                          : u < shares[t2_number] ? precision::low
                                                  : precision::skip);
        }
        return out;
    }

  private:
    std::mt19937_64 generator_;
};

const auto gate   = registered_rule::of<gate_rule>("gate", threshold_traits("(t1 and t2)"));
const auto random = registered_rule::of<random_rule>("random", threshold_traits("", -1.0, false));

} // namespace

} // namespace hobbit
