// SPDX-License-Identifier: MIT
#include "model/expert-shapes.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

std::vector<expert_matrix> distinct_matrices(const expert_index & index, tier_id tier) {
    std::vector<expert_matrix> found;
    index.each_matrix(tier, [&](expert_id id, part_id part, const part_location & at) {
        const expert_matrix matrix = { part, at.type, index.layer(id.layer).shapes[part] };
        if (std::find(found.begin(), found.end(), matrix) == found.end()) {
            found.push_back(matrix);
        }
    });
    return found;
}

size_t expert_shape::bytes() const {
    return std::accumulate(matrices.begin(), matrices.end(), size_t(0),
                           [](size_t sum, const expert_matrix & m) { return sum + m.bytes(); });
}

expert_shape expert_shapes::describe(const expert_index & index, expert_id id, tier_id tier) {
    const layer_shape & layer = index.layer(id.layer);
    expert_shape        kind;
    for (const part_id part : layer.parts) {
        const ggml_type type = index.locate(tier, id.layer, part, id.expert).type;
        kind.matrices.push_back({ part, type, layer.shapes[part] });
    }
    return kind;
}

expert_shapes::expert_shapes(const expert_index & index) {
    for (const tier_id tier : index.tiers()) {
        numbers_[tier] = { index.n_layers(), index.n_experts() };
        for (layer_id layer = 0; layer < index.n_layers(); layer++) {
            for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
                if (!index.has(tier, { layer, e })) {
                    continue;
                }
                const expert_shape kind      = describe(index, { layer, e }, tier);
                const auto         is_same   = [&](const expert_shape & k) { return k.matrices == kind.matrices; };
                const auto         known     = std::find_if(kinds_.begin(), kinds_.end(), is_same);
                numbers_[tier][{ layer, e }] = uint32_t(known - kinds_.begin());
                if (known == kinds_.end()) {
                    kinds_.push_back(kind);
                }
            }
        }
    }
}

} // namespace hobbit
