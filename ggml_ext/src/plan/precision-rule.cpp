// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include "base/name-table.h"

namespace hobbit {

// Each in a file of its own.
std::unique_ptr<precision_rule> make_gate_rule();
std::unique_ptr<precision_rule> make_random_rule();

namespace {

struct named_rule {
    const char * name;
    std::unique_ptr<precision_rule> (*make)();
};

const named_rule rules[] = {
    { "gate", make_gate_rule },
    { "random", make_random_rule },
};

} // namespace

std::unique_ptr<precision_rule> make_rule(const std::string & name) {
    return make_named(rules, name);
}

const std::vector<std::string> & rule_names() {
    static const std::vector<std::string> names = names_of(rules);
    return names;
}

} // namespace hobbit
