// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "hobbit.h"

#include <cstdlib>
#include <map>
#include <string>

namespace hobbit {

// The facts that a registered setting may depend on; they are known once the layers are placed.
struct engine_facts {
    bool cpu_shares; // hobbit.mode lets the CPU compute some of a GPU's experts
    bool predicts;   // hobbit.prefetch is above 0
};

// A number or flag of a mechanism, which takes its place in the table of settings by an object of static storage.
//
// Thread-safety: constant once main() runs.
class registered_setting {
  public:
    // Fails with what the user can do. Called for values other than the default.
    using check_function = status (*)(const engine_facts &);

    // `spec` must not be stored in files. The check may be null.
    explicit registered_setting(const hobbit_setting_spec & spec, check_function fails = nullptr) : key_(spec.key) {
        register_setting(spec);
        if (fails) {
            checks()[key_] = fails;
        }
    }

    double of(const setting_values & values) const { return values.number(key_); }

    // The first check that fails.
    static status check(const setting_values & values, const engine_facts & facts) {
        for (const auto & [key, fails] : checks()) {
            if (values.number(key) != std::strtod(find_setting(key)->default_value, nullptr)) {
                HOBBIT_TRY(fails(facts));
            }
        }
        return {};
    }

  private:
    // A function, so that it exists before the first setting.
    static std::map<std::string, check_function> & checks() {
        static std::map<std::string, check_function> all;
        return all;
    }

    const std::string key_;
};

} // namespace hobbit
