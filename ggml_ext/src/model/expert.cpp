// SPDX-License-Identifier: MIT
#include "model/expert.h"

namespace hobbit {

const char * tier_name(tier_id tier) {
    return tier == tier_id::high ? "high" : "low";
}

} // namespace hobbit
