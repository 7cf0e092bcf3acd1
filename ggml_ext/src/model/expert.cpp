// SPDX-License-Identifier: MIT
#include "model/expert.h"

namespace hobbit {

const char * tier_name(tier_id tier) {
    return tier == tier_id::high ? "high" : "low";
}

tier_terms terms_of(tier_kind high) {
    tier_terms terms;
    terms[tier_id::low]  = { term_id::low };
    terms[tier_id::high] = { term_id::high };
    if (high == tier_kind::residual) {
        terms[tier_id::high] = { term_id::low, term_id::high };
    }
    return terms;
}

} // namespace hobbit
