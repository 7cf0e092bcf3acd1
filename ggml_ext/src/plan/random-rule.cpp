// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <random>

namespace hobbit {

namespace {

// The baseline that Eq. 2 is compared with: t1 is the share of high precision, t2 the share of high or low precision.
class random_rule : public precision_rule {
  public:
    std::vector<precision> decide(const rule_input & in) override {
        std::uniform_real_distribution<double> uniform;
        std::vector<precision>                 out;
        for (size_t i = 0; i < in.routing.experts.size(); i++) {
            const score_thresholds & shares = in.thresholds[i / size_t(in.routing.n_used)];
            const double             u      = uniform(generator_);
            out.push_back(u < shares.t1 ? precision::high : u < shares.t2 ? precision::low : precision::skip);
        }
        return out;
    }

  private:
    std::mt19937_64 generator_;
};

} // namespace

std::unique_ptr<precision_rule> make_random_rule(const rule_options &) {
    return std::make_unique<random_rule>();
}

} // namespace hobbit
