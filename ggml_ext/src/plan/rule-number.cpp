// SPDX-License-Identifier: MIT
#include "plan/rule-number.h"

#include "ggml.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace hobbit {

// A function, so that it exists before the first number.
static std::vector<const rule_number *> & registry() {
    static std::vector<const rule_number *> all;
    return all;
}

rule_number::rule_number(const char * owner, const char * key, double max, const char * by_default, finer finer_values,
                         const char * help, const char * most, const char * unit, const char * note) :
    rule(owner),
    spec{ key,
          key + std::strlen("hobbit."),
          HOBBIT_TYPE_NUMBER,
          0,
          max,
          by_default,
          note,
          nullptr,
          unit,
          finer_values != finer::neither,
          true,
          nullptr,
          help },
    values(finer_values),
    limit(most),
    exact(std::strtod(by_default, nullptr)),
    place(registry().size()) {
    GGML_ASSERT(place < HOBBIT_MAX_RULE_NUMBERS);
    const auto order = [](const rule_number * n) {
        return std::pair(!n->asks_for_precision(), std::string(n->spec.key));
    };
    const auto in_order = [&](const rule_number * a, const rule_number * b) { return order(a) < order(b); };
    registry().insert(std::upper_bound(registry().begin(), registry().end(), this, in_order), this);
}

const std::vector<const rule_number *> & rule_number::all() {
    return registry();
}

const rule_number * rule_number::find(const std::string & key) {
    const auto found = std::find_if(all().begin(), all().end(), [&](auto * each) { return key == each->spec.key; });
    return found == all().end() ? nullptr : *found;
}

rule_numbers::rule_numbers() {
    for (const rule_number * each : rule_number::all()) {
        (*this)[*each] = each->exact;
    }
}

// Returns true if the number asks for at least as much precision by `a` as by `b`.
static bool is_finer(const rule_number & number, double a, double b) {
    return !number.asks_for_precision() || (number.values == rule_number::finer::larger ? a >= b : a <= b);
}

bool rule_numbers::covers(const rule_numbers & other) const {
    const auto & all = rule_number::all();
    return std::all_of(all.begin(), all.end(),
                       [&](auto * each) { return is_finer(*each, (*this)[*each], other[*each]); });
}

rule_numbers rule_numbers::pick(const rule_numbers & a, const rule_numbers & b, bool finer) {
    rule_numbers picked;
    for (const rule_number * each : rule_number::all()) {
        if (each->asks_for_precision()) {
            picked[*each] = is_finer(*each, a[*each], b[*each]) == finer ? a[*each] : b[*each];
        }
    }
    return picked;
}

} // namespace hobbit

const struct hobbit_setting_spec * hobbit_rule_number_at(size_t i) {
    const auto & all = hobbit::rule_number::all();
    return i < all.size() && all[i]->asks_for_precision() ? &all[i]->spec : nullptr;
}
