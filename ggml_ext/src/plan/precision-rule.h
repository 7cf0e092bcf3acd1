// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "model/expert.h"
#include "plan/precision-costs.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hobbit {

// A token's demands on the rule. Each rule uses its own numbers, and the others keep their defaults, with which every
// rule gives high precision.
struct score_thresholds {
    double t1    = 1.0; // for rules that take no price
    double t2    = 1.0;
    double price = 0.0; // for other rules: nats of divergence that loading one expert in high precision is worth

    double confidence = 0.0; // for a registered judge, see batch_passes; 0: none

    bool all_high() const { return t1 >= 1.0 && price <= 0.0; }
};

// The lowest thresholds with which experts are at least as precise as with either.
score_thresholds higher(const score_thresholds & a, const score_thresholds & b);

// A layer's choice of experts for a batch, made by its router. A selection is one expert of one token; its number is
// token * n_used + rank.
struct layer_routing {
    layer_id             layer    = 0;
    int64_t              n_tokens = 0;
    int64_t              n_used   = 0; // experts per token
    std::vector<int32_t> experts;      // [selection]
    std::vector<float>   weights;      // [selection]; empty where they are unknown
};

// Returns true if all parts of an expert are resident in a tier.
using residency = std::function<bool(expert_id id, tier_id tier)>;

// A rule's view of one layer and batch.
struct rule_input {
    const layer_routing &                 routing;
    const std::vector<score_thresholds> & thresholds; // [token]
    const residency &                     is_resident;
    bool                                  has_low; // there is a pool for low precision
    presence                              has_high = {};
};

// Decides for each selection of one layer and batch: high precision, low precision or skip. A rule decides for each
// token alone, and as if all experts had a high version. plan_layer then raises a decision where another token of the
// batch needs the expert in a better precision, or where a better version is resident.
//
// A new rule is a file of its own, which registers it. Thread-safety: none; a rule may keep state.
class precision_rule {
  public:
    virtual ~precision_rule() = default;

    // Returns one precision per selection. precision::low counts as high where there is no low pool.
    virtual std::vector<precision> decide(const rule_input & in) = 0;
};

struct rule_options {
    std::string             name;
    const precision_costs * costs     = nullptr; // for rules that take a price; must outlive the rule
    double                  low_bytes = 1.0;     // bytes of an expert in low precision, relative to high precision
};

struct rule_traits {
    const char * help        = "";    // for the setting hobbit.rule, which takes the names
    bool         takes_price = false; // the rule's number is the price; otherwise its numbers are t1 and t2

    // t1 and t2 where only the rule is given, in a cache without a low pool; negative: no number of its own
    double own_threshold = -1.0;

    bool is_predictable = true; // false: prefetch follows the rule gate
};

using registered_rule = registered<precision_rule, rule_options, rule_traits>;

inline bool takes_price(const std::string & rule) {
    return registered_rule::traits(rule).takes_price;
}

// Returns true if weights say which expert is more important: their sum is positive and finite. Weights may come from
// any router (softmax or sigmoid, normalised or not).
bool ranks_experts(const float * weights, size_t n);

// The experts of one token by falling weight: indices in `weights`. Equal weights keep their order.
std::vector<size_t> by_weight(const float * weights, size_t n);

// The precision of an expert that is not its token's first: high up to t1, low up to t2, and above t2 it is skipped.
precision of_score(double score, const score_thresholds & thresholds);

// Eq. 2 of HOBBIT for one token, the rule "gate". Experts are ranked by weight. An expert's score is the sum of the
// normalised weights ranked before it: up to t1 the expert is high, up to t2 low, and above t2 it is skipped. The first
// expert is always high. All are high if the weights do not rank them. out[i] belongs to weights[i]. Pure.
void score_experts(const float * weights, size_t n, const score_thresholds & thresholds, precision * out);

} // namespace hobbit
