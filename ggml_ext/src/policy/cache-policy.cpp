// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include "policy/policies.h"

namespace hobbit {

namespace {

struct named_policy {
    const char * name;
    std::unique_ptr<cache_policy> (*make)(const policy_options &);
};

const named_policy policies[] = {
    { "lru", make_lru },
    { "lfu", make_lfu },
    { "lhu", make_lhu },
    { "fld", make_fld },
    { "random", make_random },
    { "hobbit", make_hobbit },
    { "moe-infinity", make_moe_infinity },
    { "edgemoe", make_edgemoe },
    { "echo", make_echo },
};

} // namespace

std::unique_ptr<cache_policy> make_policy(const policy_options & options) {
    for (const named_policy & policy : policies) {
        if (options.name == policy.name) {
            return policy.make(options);
        }
    }
    return nullptr;
}

const std::vector<std::string> & policy_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> all;
        for (const named_policy & policy : policies) {
            all.push_back(policy.name);
        }
        return all;
    }();
    return names;
}

} // namespace hobbit
