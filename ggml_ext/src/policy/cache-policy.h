// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hobbit {

// Tokens of one sequence, in one batch, that chose an expert.
struct expert_usage {
    expert_id id;
    uint32_t  sequence;
    tier_id   tier; // that serves them
    uint32_t  n_tokens;
    double    weight; // sum over the tokens of their normalised gate weight, 0 to n_tokens
};

// What a policy may be made of; see make_policy.
struct policy_options {
    std::string           name    = "lru";
    std::array<double, 4> weights = { 0.6, 0.25, 0.15, 0.0 }; // of LRU, LFU, LHU, FLD in Eq. 3; sum 1; docs/policies.md
    uint32_t              n_layers  = 0;
    uint32_t              n_experts = 0; // per layer, the largest
    uint32_t              n_used    = 0; // per token and layer
    uint64_t              seed      = 0; // of the random policy

    bool high_is_residual = false; // then every use takes the low pool, and a use in high precision both pools
};

// Says what each expert in the cache is worth: the least valuable one is evicted. One object serves the pools of all
// tiers. Pure: no clock, lock or I/O, so that the simulator drives the same object as the engine.
//
// Order of calls: begin_sequence before a sequence's first token; for every batch begin_tokens for each of its
// sequences, then layer by layer on_use for every expert chosen, in the order of experts, before any is loaded.
class cache_policy {
  public:
    virtual ~cache_policy() = default;

    // The sequence begins anew: what was recorded of an earlier one under this number is forgotten.
    virtual void begin_sequence(uint32_t sequence) = 0;

    // The next n tokens of the sequence are about to run through all layers.
    virtual void begin_tokens(uint32_t sequence, uint32_t n) = 0;

    virtual void on_use(const expert_usage & use) = 0;

    // What keeping the expert in the tier's pool is worth while `layer` runs, in no unit: only the order counts.
    // Never called for experts that were not used since the object was made, but for those that were prefetched.
    virtual double value(expert_id id, term_id term, layer_id layer) = 0;
};

// The policy of that name, or null where there is none: policy_names lists them.
std::unique_ptr<cache_policy> make_policy(const policy_options & options);

const std::vector<std::string> & policy_names();

} // namespace hobbit
