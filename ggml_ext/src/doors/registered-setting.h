// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "hobbit.h"

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
    explicit registered_setting(const hobbit_setting_spec & spec, check_function check = nullptr);

    double of(const setting_values & values) const { return values.number(key_); }

    // The first check that fails.
    static status check(const setting_values & values, const engine_facts & facts);

  private:
    const std::string key_;
};

} // namespace hobbit
