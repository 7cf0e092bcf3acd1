// SPDX-License-Identifier: MIT
#include "plan/layer-plan.h"
#include "plan/precision-rule.h"

#include <algorithm>

namespace hobbit {

namespace {

const rule_number price_number("price", "hobbit.price", 1e9, "0", rule_number::finer::smaller,
                               "Rule price: quality loss accepted to save loading an expert.", nullptr, "nats",
                               "the calibration's");

// EdgeMoE's sensitivities in HOBBIT's decision for each token: a use gets the precision with the smallest
// w^2 * cost + price * bytes. `bytes` is what has to be loaded, in units of an expert in high precision, so that
// resident versions are free. A token's first expert is never skipped. The better precision wins among equal choices.
//
// The rule "edgemoe" knows no weights: an expert is high or low for all tokens (EdgeMoE, III-B), by its cost alone.
class price_rule : public precision_rule {
  public:
    explicit price_rule(const rule_options & options) : options_(options), weighs_(options.name != "edgemoe") {}

  private:
    void decide_token(const rule_input & in, size_t first, precision * out) override {
        std::vector<double> weights(size_t(in.routing.n_used));
        normalize_weights(&in.routing.weights[first], weights.size(), weights.data());
        const auto best = std::max_element(weights.begin(), weights.end()) - weights.begin();
        for (size_t i = 0; i < weights.size(); i++) {
            out[i] = choose(in, first + i, weights[i], i == size_t(best));
        }
    }

    precision choose(const rule_input & in, size_t selection, double weight, bool is_first) const {
        const expert_id id    = { in.routing.layer, uint32_t(in.routing.experts[selection]) };
        const double    price = in.thresholds[selection / size_t(in.routing.n_used)][price_number];
        const double    loss  = weighs_ ? weight * weight : 1.0;
        precision       best  = precision::high;
        double          least = price * missing_bytes(in, id, tier_id::high);
        // 0 * infinity is NaN, which is below nothing: such a choice is never made
        const auto consider = [&](precision p, double total) {
            if (total < least) {
                best  = p;
                least = total;
            }
        };
        if (in.has_low) {
            consider(precision::low, loss * options_.costs->low(id) + price * missing_bytes(in, id, tier_id::low));
        }
        if (!is_first && weighs_) {
            consider(precision::skip, loss * options_.costs->skip(id));
        }
        return best;
    }

    double missing_bytes(const rule_input & in, expert_id id, tier_id tier) const {
        if (in.is_resident(id, tier)) {
            return 0.0;
        }
        return tier == tier_id::low ? options_.low_bytes : 1.0;
    }

    const rule_options options_;
    const bool         weighs_; // false: the rule "edgemoe"
};

const rule_traits traits = { "", "hobbit.price", true, -1.0, nullptr, nullptr, nullptr };

const auto price   = registered_rule::of<price_rule>("price", traits);
const auto edgemoe = registered_rule::of<price_rule>("edgemoe", traits);

} // namespace

} // namespace hobbit
