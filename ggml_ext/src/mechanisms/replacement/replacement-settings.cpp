// SPDX-License-Identifier: MIT
#include "base/setting-table.h"
#include "base/stats.h"

namespace hobbit {

[[maybe_unused]] static const bool are_registered[] = {
    register_setting(
        { "hobbit.degrade", "degrade", HOBBIT_TYPE_FLAG, 0, 1, "0", nullptr, nullptr, nullptr, false, false, nullptr,
          "Load only the best of a token's missing experts; resident ones replace the others (DAOP). Approximate." }),
    register_counter("selections_replaced", "replaced_selections_total",
                     "Expert selections that a resident expert served in place of a missing one"),
};

} // namespace hobbit
