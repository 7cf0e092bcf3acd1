// SPDX-License-Identifier: MIT
#include "model/expert-index.h"

#include <algorithm>

namespace hobbit {

// An expert has all parts of its version in a tier or none, and one version at least. A tier has at least one expert.
static status check_tiers(const expert_index & index, const std::string & path) {
    for (const layer_id layer : index.layers()) {
        const layer_shape & shape = index.layer(layer);
        for (uint32_t e = 0; e < shape.n_experts; e++) {
            if (!index.has(tier_id::high, { layer, e }) && !index.has(tier_id::low, { layer, e })) {
                return status::error("'%s': expert %u of blk.%u is in no tier: convert the model again", path.c_str(),
                                     e, shape.block);
            }
            for (const tier_id tier : TIERS) {
                for (const part_id part : shape.parts) {
                    if ((index.locate(tier, layer, part, e).size > 0) != index.has(tier, { layer, e })) {
                        return status::error("'%s': the %s tier has some of the tensors of expert %u of blk.%u and "
                                             "lacks others: convert the model again",
                                             path.c_str(), tier_name(tier), e, shape.block);
                    }
                }
            }
        }
    }
    for (const tier_id tier : TIERS) {
        if (index.n_held(tier) == 0) {
            return status::error("'%s': the %s tier has no expert at all: convert the model again", path.c_str(),
                                 tier_name(tier));
        }
    }
    return {};
}

// An expert has the version that there is, where a rule gives the other one. REQUIRES: pools for both tiers
static precision as_stored(const expert_index & index, expert_id id, precision given) {
    const precision best = index.has(tier_id::high, id) ? precision::high : precision::low;
    return given == precision::low && !index.has(tier_id::low, id) ? best : std::min(given, best);
}

// The high tier lacks experts, and the low one has them all.
const registered_format partial("3", nullptr, { tier_id::low, "partial", "complete", check_tiers, as_stored });

// Each expert has one version: their tensors have as many experts as the model.
const registered_format once("4", nullptr, { {}, "partial", "partial", check_tiers, as_stored });

} // namespace hobbit
