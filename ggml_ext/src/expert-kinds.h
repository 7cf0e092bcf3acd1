// SPDX-License-Identifier: MIT
#pragma once

#include "expert-index.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Experts that are alike: in one precision, with matrices of one type and shape.
struct expert_kind {
    // A matrix of the expert, or of one of the terms that it is the sum of.
    struct matrix {
        ggml_type    type;
        matrix_shape shape;

        bool operator==(const matrix & o) const {
            return type == o.type && shape.n_in == o.shape.n_in && shape.n_out == o.shape.n_out;
        }
    };

    std::vector<matrix> matrices;

    size_t bytes() const;
};

// The kinds that a model has, numbered. Constant.
class expert_kinds {
  public:
    explicit expert_kinds(const expert_index & index);

    const std::vector<expert_kind> & all() const { return kinds_; }

    uint32_t of(expert_id id, uint32_t tier) const { return numbers_[tier][size_t(id.layer) * n_experts_ + id.expert]; }

  private:
    static expert_kind describe(const expert_index & index, expert_id id, uint32_t tier);

    const uint32_t                                n_experts_;
    std::vector<expert_kind>                      kinds_;
    std::array<std::vector<uint32_t>, TIER_COUNT> numbers_; // [tier][layer * n_experts + expert]
};

} // namespace hobbit
