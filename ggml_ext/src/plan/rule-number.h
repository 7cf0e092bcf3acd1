// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"

#include <cstddef>
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

} // namespace hobbit
