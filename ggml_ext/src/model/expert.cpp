// SPDX-License-Identifier: MIT
#include "model/expert.h"

namespace hobbit {

const char * tier_name(uint32_t tier) {
    return tier == TIER_HIGH ? "high" : "low";
}

const std::vector<uint32_t> & terms_of(uint32_t tier, bool high_is_residual) {
    static const std::vector<uint32_t> complete[TIER_COUNT] = { { TIER_HIGH }, { TIER_LOW } };
    static const std::vector<uint32_t> sum                  = { TIER_LOW, TIER_HIGH };
    return high_is_residual && tier == TIER_HIGH ? sum : complete[tier];
}

} // namespace hobbit
