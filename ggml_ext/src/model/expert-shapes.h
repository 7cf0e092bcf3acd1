// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert-index.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Type and shape of one matrix of an expert's tier.
struct expert_matrix {
    part_id      part;
    ggml_type    type;
    matrix_shape shape;

    size_t bytes() const { return ggml_row_size(type, shape.n_in) * size_t(shape.n_out); }

    bool operator==(const expert_matrix & o) const {
        return part == o.part && type == o.type && shape.n_in == o.shape.n_in && shape.n_out == o.shape.n_out;
    }
};

// The distinct matrices of a tier's experts.
std::vector<expert_matrix> distinct_matrices(const expert_index & index, tier_id tier);

// A kind of experts: one precision, and matrices of the same types and shapes.
struct expert_shape {
    std::vector<expert_matrix> matrices;

    size_t bytes() const;
};

// The kinds of a model's experts, numbered. Constant.
class expert_shapes {
  public:
    explicit expert_shapes(const expert_index & index);

    const std::vector<expert_shape> & all() const { return kinds_; }

    // REQUIRES: the tier has the expert
    uint32_t of(expert_id id, tier_id tier) const { return numbers_[tier][id]; }

  private:
    static expert_shape describe(const expert_index & index, expert_id id, tier_id tier);

    std::vector<expert_shape>        kinds_;
    per_tier<expert_table<uint32_t>> numbers_;
};

} // namespace hobbit
