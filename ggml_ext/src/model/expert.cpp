// SPDX-License-Identifier: MIT
#include "model/expert.h"

namespace hobbit {

const char * tier_name(tier_id tier) {
    return tier == tier_id::high ? "high" : "low";
}

const std::vector<term_id> & terms_of(tier_id tier, bool high_is_residual) {
    static const per_tier<std::vector<term_id>> complete = { { { { term_id::high }, { term_id::low } } } };
    static const std::vector<term_id>           sum      = { term_id::low, term_id::high };
    return high_is_residual && tier == tier_id::high ? sum : complete[tier];
}

} // namespace hobbit
