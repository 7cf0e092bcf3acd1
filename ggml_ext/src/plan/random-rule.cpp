// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <random>

namespace hobbit {

namespace {

// The baseline that Eq. 2 is compared with: t1 is the share of high precision, t2 the share of high or low precision.
class random_rule : public precision_rule {
  public:
    explicit random_rule(const rule_options &) {}

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

const auto maker = registered_rule::of<random_rule>("random", { "", false, -1.0, false });

} // namespace

} // namespace hobbit
