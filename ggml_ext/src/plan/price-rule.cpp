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

    std::vector<precision> decide(const rule_input & in) override {
        const layer_routing &  routing = in.routing;
        std::vector<precision> out(routing.experts.size(), precision::high);
        std::vector<double>    weights(size_t(routing.n_used));
        for (int64_t t = 0; t < routing.n_tokens && !routing.weights.empty(); t++) {
            const float * given = &routing.weights[t * routing.n_used];
            if (in.thresholds[t].all_high() || !ranks_experts(given, weights.size())) {
                continue;
            }
            normalize_weights(given, weights.size(), weights.data());
            const auto first = std::max_element(weights.begin(), weights.end()) - weights.begin();
            for (int64_t i = 0; i < routing.n_used; i++) {
                const int64_t selection = t * routing.n_used + i;
                out[selection]          = choose(in, selection, weights[i], i == first);
            }
        }
        return out;
    }

  private:
    precision choose(const rule_input & in, int64_t selection, double weight, bool is_first) const {
        const expert_id id    = { in.routing.layer, uint32_t(in.routing.experts[selection]) };
        const double    price = in.thresholds[selection / in.routing.n_used][price_number];
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

const rule_traits traits = { "", "hobbit.price", true, true, -1.0, nullptr, nullptr, nullptr };

const auto price   = registered_rule::of<price_rule>("price", traits);
const auto edgemoe = registered_rule::of<price_rule>("edgemoe", traits);

} // namespace

} // namespace hobbit
