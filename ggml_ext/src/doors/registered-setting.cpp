// SPDX-License-Identifier: MIT
#include "doors/registered-setting.h"

#include <cstdlib>
#include <map>

namespace hobbit {

// A function, so that it exists before the first setting.
static std::map<std::string, registered_setting::check_function> & checks() {
    static std::map<std::string, registered_setting::check_function> all;
    return all;
}

registered_setting::registered_setting(const hobbit_setting_spec & spec, check_function fails) : key_(spec.key) {
    register_setting(spec);
    if (fails) {
        checks()[key_] = fails;
    }
}

status registered_setting::check(const setting_values & values, const engine_facts & facts) {
    for (const auto & [key, fails] : checks()) {
        if (values.number(key) != std::strtod(find_setting(key)->default_value, nullptr)) {
            HOBBIT_TRY(fails(facts));
        }
    }
    return {};
}

} // namespace hobbit
