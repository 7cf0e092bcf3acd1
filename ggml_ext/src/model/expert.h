// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

// The nouns of the code base: an expert, its matrices (parts), its versions (tiers) and where a matrix lies in a file.

namespace hobbit {

struct expert_id {
    uint32_t layer;
    uint32_t expert;

    bool operator==(const expert_id & other) const { return layer == other.layer && expert == other.expert; }
};

// The weight matrices of one expert. A layer has either gate (optional) and up, or both fused in gate_up; and down.
enum expert_part : uint32_t { PART_GATE, PART_UP, PART_GATE_UP, PART_DOWN, PART_COUNT };

// Versions of the experts.
enum tier : uint32_t { TIER_HIGH, TIER_LOW, TIER_COUNT };

constexpr uint32_t part_bit(uint32_t part) {
    return 1u << part;
}

const char * tier_name(uint32_t tier); // "high"

// The tiers whose matrices make up an expert of the tier, in the order in which their products are added: the tier
// itself, or the low one and then the residual.
const std::vector<uint32_t> & terms_of(uint32_t tier, bool high_is_residual);

// One expert's matrix in a file.
struct part_location {
    uint32_t  file   = 0; // index into expert_index::files()
    uint64_t  offset = 0;
    uint64_t  size   = 0;
    ggml_type type   = GGML_TYPE_COUNT;
};

struct matrix_shape {
    int64_t n_in  = 0;
    int64_t n_out = 0;
};

// What a routed expert tensor of a ggml graph stands for. The cache's buffer type keeps it in the tensor's `extra`.
struct expert_tensor {
    uint32_t layer = 0;
    uint32_t part  = PART_COUNT;
};

} // namespace hobbit
