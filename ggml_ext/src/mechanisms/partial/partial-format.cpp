// SPDX-License-Identifier: MIT
#include "model/expert-index.h"

#include <algorithm>

namespace hobbit {

// An expert has all parts of its high version or none, and the tier has at least one expert.
static status check_high(const expert_index & index, const std::string & path) {
    for (const layer_id layer : index.layers()) {
        for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
            for (const part_id part : index.layer(layer).parts) {
                if ((index.locate(tier_id::high, layer, part, e).size > 0) != index.has(tier_id::high, { layer, e })) {
                    return status::error("'%s': the high tier has some of the tensors of expert %u of blk.%u and lacks "
                                         "others: convert the model again",
                                         path.c_str(), e, index.layer(layer).block);
                }
            }
        }
    }
    return index.n_held(tier_id::high) > 0
               ? status()
               : status::error("'%s': the high tier has no expert at all: convert the model again", path.c_str());
}

// An expert without a high version is low where a rule gives high, which REQUIRES a low pool.
static precision at_best(const expert_index & index, expert_id id, precision given) {
    return index.has(tier_id::high, id) ? given : std::min(given, precision::low);
}

// The high tier lacks experts, and the low one has them all.
const registered_format partial("3", nullptr, { tier_id::low, "partial", check_high, at_best });

} // namespace hobbit
