// SPDX-License-Identifier: MIT
#include "doors/registered-setting.h"

#include "base/setting-table.h"

#include <cstdlib>

namespace hobbit {

namespace {

struct tables {
    std::map<std::string, hobbit_setting_spec>                specs;
    std::map<std::string, registered_setting::check_function> checks;
};

// A function, so that they exist before the first setting.
tables & registry() {
    static tables all;
    return all;
}

} // namespace

registered_setting::registered_setting(const hobbit_setting_spec & spec, check_function fails) : key_(spec.key) {
    registry().specs[key_] = spec;
    register_settings([spec] { return std::vector<hobbit_setting_spec>{ spec }; });
    if (fails) {
        registry().checks[key_] = fails;
    }
}

const std::map<std::string, hobbit_setting_spec> & registered_setting::all() {
    return registry().specs;
}

status registered_setting::check(const registered_values & values, const engine_facts & facts) {
    for (const auto & [key, fails] : registry().checks) {
        if (values.at(key) != std::strtod(all().at(key).default_value, nullptr)) {
            HOBBIT_TRY(fails(facts));
        }
    }
    return {};
}

} // namespace hobbit
