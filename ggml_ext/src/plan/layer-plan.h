// SPDX-License-Identifier: MIT
#pragma once

#include "plan/scorer.h"
#include "policy/cache-policy.h"

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace hobbit {

// What a layer's router chose for a batch. Selections are numbered token * n_used + rank.
struct layer_routing {
    uint32_t             layer    = 0;
    int64_t              n_tokens = 0;
    int64_t              n_used   = 0; // experts per token
    std::vector<int32_t> experts;      // [selection]
    std::vector<float>   weights;      // [selection], empty where they are not known
};

// An expert in one precision and the selections that it serves.
struct planned_use {
    expert_id            id;
    uint32_t             tier;
    std::vector<int32_t> selections;
};

// How precisions are decided.
struct plan_rules {
    score_thresholds thresholds;
    bool             strict  = false; // each token gets what is decided for it
    bool             random  = false; // t1 and t2 are the shares of high and of high or low precision
    bool             has_low = false; // there is a low pool

    std::vector<score_thresholds> by_token = {}; // [token] in place of thresholds, where not empty
};

struct layer_plan {
    std::vector<planned_use> uses;       // by expert
    std::vector<int32_t>     skipped;    // selections
    std::vector<precision>   precisions; // [selection], what serves it
};

// Whether a whole expert is resident in a tier.
using residency = std::function<bool(expert_id id, uint32_t tier)>;

// Decides what serves each selection: for every expert the best precision that any of its tokens asks for (Eq. 2), or a
// better one that is resident. Draws from `generator` under random rules alone.
layer_plan plan_layer(const layer_routing & routing, const plan_rules & rules, const residency & is_resident,
                      std::mt19937_64 & generator);

// The weights of one token's experts, made to sum to 1; equal ones where they cannot be.
void normalize_weights(const float * weights, size_t n, double * out);

} // namespace hobbit
