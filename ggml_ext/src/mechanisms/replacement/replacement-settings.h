// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "doors/registered-setting.h"

namespace hobbit {

inline const registered_setting degrade_setting(
    { "hobbit.degrade", "degrade", HOBBIT_TYPE_FLAG, 0, 1, "0", nullptr, nullptr, nullptr, false, false, nullptr,
      "Load only the best of a token's missing experts; resident ones replace the others (DAOP). Approximate." });

inline const registered_counter
    selections_replaced("selections_replaced", "replaced_selections_total",
                        "Expert selections that a resident expert served in place of a missing one");

} // namespace hobbit
