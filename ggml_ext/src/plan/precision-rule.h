// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "base/status.h"
#include "hobbit.h"
#include "model/expert.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hobbit {

// A number that decides how precise experts are. Users, requests and calibrations give it as a setting. An object of
// static storage in the file of the rule that brings it: settings, rule_numbers and hobbit_precision take it from
// there.
//
// Thread-safety: constant once main() runs.
class rule_number {
  public:
    // The values that ask for more precision.
    enum class finer { larger, smaller, neither };

    // rule: the one that a model gets with this number; "": any. key: "hobbit." and the option's name. It lies between
    // 0 and max. exact: its default, with which every expert is high. limit: key of a number that this one must not
    // exceed. Null: none, as for the unit and for a note on the default.
    rule_number(const char * rule, const char * key, double max, const char * exact, finer values, const char * help,
                const char * limit = nullptr, const char * unit = nullptr, const char * note = nullptr);

    bool asks_for_precision() const { return values != finer::neither; }

    const std::string         rule;
    const hobbit_setting_spec spec;
    const finer               values;
    const char * const        limit;
    const double              exact;
    const size_t              place; // in rule_numbers

    // All numbers in the order of keys; those that ask for no precision come last.
    static const std::vector<const rule_number *> & all();

    // Null for an unknown key.
    static const rule_number * find(const std::string & key);
};

// The demands of a token: a value for each number. Each rule uses its own, and the others keep their defaults.
class rule_numbers {
  public:
    rule_numbers(); // all high
    explicit rule_numbers(const hobbit_precision & precision) : values_(precision) {}

    double   operator[](const rule_number & number) const { return values_.numbers[number.place]; }
    double & operator[](const rule_number & number) { return values_.numbers[number.place]; }

    const hobbit_precision & c() const { return values_; }

    bool all_high() const { return covers({}); }

    // Returns true if experts are at least as precise as with `other`.
    bool covers(const rule_numbers & other) const;

    // The lowest precision that covers both, and the highest that both cover.
    static rule_numbers higher(const rule_numbers & a, const rule_numbers & b) { return pick(a, b, true); }
    static rule_numbers lower(const rule_numbers & a, const rule_numbers & b) { return pick(a, b, false); }

  private:
    static rule_numbers pick(const rule_numbers & a, const rule_numbers & b, bool finer);

    hobbit_precision values_ = {}; // [rule_number::place]
};

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
    const layer_routing &             routing;
    const std::vector<rule_numbers> & thresholds; // [token]
    const residency &                 is_resident;
    bool                              has_low; // there is a pool for low precision
    serving                           served = {};
};

// Decides for each selection of one layer and batch: high precision, low precision or skip. A rule decides for each
// token alone, and as if all experts had a high version. plan_layer then raises a decision where another token of the
// batch needs the expert in a better precision, or where a better version is resident.
//
// A new rule is a file of its own, which registers it. Thread-safety: none; a rule may keep state.
class precision_rule {
  public:
    virtual ~precision_rule() = default;

    // Returns one precision per selection: high for a token whose numbers are all high, or whose weights do not rank
    // its experts. precision::low counts as high where there is no low pool.
    std::vector<precision> decide(const rule_input & in);

  private:
    // Decides for the other tokens. first: a token's first selection. out: of its selections, all high so far
    virtual void decide_token(const rule_input & in, size_t first, precision * out) = 0;
};

// Quality costs of low precision and of skipping, by layer or by expert. A use with the normalised weight w adds about
// w^2 * cost to the divergence (in nats) of the token's predictions. Infinity: never. pyhobbit calibrate measures the
// costs. Thread-safety: none.
class precision_costs {
  public:
    // `low` and `skip` have one number per layer, or one per expert and layer: [layer * n_experts + expert].
    status set(std::vector<float> low, std::vector<float> skip, uint32_t n_layers, uint32_t n_experts);

    bool empty() const { return low_.empty(); }

    // REQUIRES: not empty
    double low(expert_id id) const { return low_[place(id)]; }
    double skip(expert_id id) const { return skip_[place(id)]; }

  private:
    size_t place(expert_id id) const { return size_t(id.layer) * n_per_layer_ + (n_per_layer_ > 1 ? id.expert : 0); }

    std::vector<float> low_;
    std::vector<float> skip_;
    size_t             n_per_layer_ = 1;
};

struct rule_options {
    std::string             name;
    const precision_costs * costs     = nullptr; // for rules that take a price; must outlive the rule
    double                  low_bytes = 1.0;     // bytes of an expert in low precision, relative to high precision
};

// Facts about a rule that callers need. Each function may be null, which stands for the value behind it.
struct rule_traits {
    const char * help        = "";    // for the setting hobbit.rule, which takes the names
    const char * numbers     = "";    // keys of the numbers by which it decides, separated by spaces
    bool         needs_costs = false; // it decides by precision_costs

    // The value of its numbers where only the rule is given, in a cache without a low pool; negative: the default.
    double own_value = -1.0;

    bool (*asks_for_low)(const rule_numbers &) = nullptr; // some experts are to be low; !all_high()

    // Slots of the low pool wanted for each slot of the high one; 1 where it asks for low precision, else 0.
    double (*low_demand)(const rule_numbers &) = nullptr;

    // The numbers of hobbit.quality small-loss and fast without a calibration, for a low tier of so many bits; all
    // high.
    rule_numbers (*of_bits)(double low_bits, bool is_fast) = nullptr;
};

using registered_rule = registered<precision_rule, rule_options, rule_traits>;

// The numbers by which a rule decides, in the order of its traits; none if its name is unknown.
std::vector<const rule_number *> numbers_of(const std::string & rule);

// See rule_traits.
bool   asks_for_low(const std::string & rule, const rule_numbers & numbers);
double low_demand(const std::string & rule, const rule_numbers & numbers);

// The numbers of a rule for people, such as "t1 0.6, t2 0.9", and with a prefix "--set t1=0.6"; "" if all is high.
std::string text_of(const std::string & rule, const rule_numbers & numbers, const char * prefix = "",
                    const char * separator = ", ");

// Returns true if weights say which expert is more important: their sum is positive and finite. Weights may come from
// any router (softmax or sigmoid, normalised or not).
bool ranks_experts(const float * weights, size_t n);

// The experts of one token by falling weight: indices in `weights`. Equal weights keep their order.
std::vector<size_t> by_weight(const float * weights, size_t n);

extern const rule_number t1_number; // up to this score an expert is high
extern const rule_number t2_number; // up to this score it is low

// Traits of a rule that decides by t1 and t2.
rule_traits threshold_traits(const char * help, double own_value = -1.0);

// The precision of an expert that is not its token's first: high up to t1, low up to t2, and above t2 it is skipped.
precision of_score(double score, const rule_numbers & thresholds);

} // namespace hobbit
