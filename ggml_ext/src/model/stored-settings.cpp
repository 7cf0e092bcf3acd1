// SPDX-License-Identifier: MIT
#include "model/stored-settings.h"

namespace hobbit {

const std::vector<const char *> & stored_setting_keys() {
    static const std::vector<const char *> keys = {
        "hobbit.t1",    "hobbit.t2",    "hobbit.low_share", "hobbit.prefetch",
        "hobbit.w_lru", "hobbit.w_lfu", "hobbit.w_lhu",     "hobbit.w_fld",
    };
    return keys;
}

} // namespace hobbit
