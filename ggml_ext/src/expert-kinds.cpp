// SPDX-License-Identifier: MIT
#include "expert-kinds.h"

#include <algorithm>

namespace hobbit {

size_t expert_kind::bytes() const {
    size_t sum = 0;
    for (const matrix & m : matrices) {
        sum += ggml_row_size(m.type, m.shape.n_in) * size_t(m.shape.n_out);
    }
    return sum;
}

expert_kind expert_kinds::describe(const expert_index & index, expert_id id, uint32_t tier) {
    const layer_shape & layer = index.layer(id.layer);
    expert_kind         kind;
    for (const uint32_t term : index.terms(tier)) {
        for (uint32_t part = 0; part < PART_COUNT; part++) {
            if (layer.parts & part_bit(part)) {
                kind.matrices.push_back({ index.locate(term, id.layer, part, id.expert).type, layer.shapes[part] });
            }
        }
    }
    return kind;
}

expert_kinds::expert_kinds(const expert_index & index) : n_experts_(index.n_experts()) {
    for (uint32_t tier = 0; tier < index.n_tiers(); tier++) {
        numbers_[tier].resize(index.n_layers() * n_experts_);
        for (uint32_t layer = 0; layer < index.n_layers(); layer++) {
            for (uint32_t e = 0; e < index.layer(layer).n_experts; e++) {
                const expert_kind kind    = describe(index, { layer, e }, tier);
                const auto        is_same = [&](const expert_kind & k) { return k.matrices == kind.matrices; };
                const auto        known   = std::find_if(kinds_.begin(), kinds_.end(), is_same);
                numbers_[tier][size_t(layer) * n_experts_ + e] = uint32_t(known - kinds_.begin());
                if (known == kinds_.end()) {
                    kinds_.push_back(kind);
                }
            }
        }
    }
}

} // namespace hobbit
