// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

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
    for (const named_rule & rule : rules) {
        if (name == rule.name) {
            return rule.make();
        }
    }
    return nullptr;
}

const std::vector<std::string> & rule_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> all;
        for (const named_rule & rule : rules) {
            all.push_back(rule.name);
        }
        return all;
    }();
    return names;
}

} // namespace hobbit
