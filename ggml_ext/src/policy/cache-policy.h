// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "model/expert.h"

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace hobbit {

// How many tokens of one sequence, in one batch, chose an expert.
struct expert_usage {
    expert_id id;
    uint32_t  sequence;
    tier_id   tier; // tier that serves them
    uint32_t  n_tokens;
    double    weight; // sum over the tokens of their normalised gate weight, 0 to n_tokens
    uint32_t  n_used; // experts of a token in this layer
};

// Parameters of a policy; see registered_policy.
struct policy_options {
    std::string           name      = "lru";
    std::array<double, 4> weights   = { 0.6, 0.25, 0.15, 0.0 }; // weights of LRU, LFU, LHU, FLD in Eq. 3; sum 1
    uint32_t              n_layers  = 0;
    uint32_t              n_experts = 0; // per layer, the largest
    uint32_t              n_used    = 0; // per token, the largest of any layer
    uint64_t              seed      = 0; // seed of the random policy

    // Uses per token in earlier runs; empty where nothing is known.
    expert_table<float> prior = {};

    // A value of the policy's own for each expert.
    template <typename T>
    expert_table<T> table() const {
        return { n_layers, n_experts };
    }
};

// A resident expert that may be evicted.
struct candidate {
    expert_id id;
    uint64_t  touched; // rises with each insert or use in the pool
};

// The eviction order of one pool, the slots of a tier on one device. The pool reports every insert.
//
// A policy gives each expert a value, and the least valuable candidate is the victim, or overrides victim().
class pool_policy {
  public:
    virtual ~pool_policy() = default;

    virtual void on_insert(expert_id) {}

    // Returns true if the newcomer may take the victim's slot. The pool asks this for prefetches and other inserts in
    // the background, and drops them if refused. It never asks for a demand, because the expert is computed from its
    // slot: a policy that would refuse one makes it the next victim instead.
    virtual bool admits(expert_id /* newcomer */, expert_id /* victim */) { return true; }

    // The candidate to evict while layer `running` runs, of one or more. Unless refused by admits(), it is evicted.
    virtual expert_id victim(const std::vector<candidate> & candidates, layer_id running);

    // The worth of keeping the expert while layer `running` runs, without a unit: only the order counts.
    virtual double value(expert_id, layer_id /* running */) { return 0.0; }

    // The candidate of the largest value, the most recently touched among equals; REQUIRES: at least one.
    expert_id most_valuable(const std::vector<candidate> & candidates, layer_id running);
};

// An eviction policy. One object serves all pools of all tiers: it hears the routing of every batch and keeps what the
// pools have in common. Pure (no clock, lock or I/O), so that the simulator runs the same object as the engine.
//
// Order of calls: begin_sequence before a sequence's first token; for every batch begin_tokens for each of its
// sequences, then layer by layer on_use for every chosen expert, in the order of experts, before any is loaded.
//
// Thread-safety: none.
class cache_policy {
  public:
    virtual ~cache_policy() = default;

    // The sequence starts again: the policy forgets its records of an earlier one with this number.
    virtual void begin_sequence(uint32_t) {}

    // The next `n` tokens of the sequence are about to run through all layers.
    virtual void begin_tokens(uint32_t /* sequence */, uint32_t /* n */) {}

    // Hits and misses alike.
    virtual void on_use(const expert_usage &) {}

    // See pool_policy. Only a prefetched expert may be unused so far.
    virtual double value(expert_id, tier_id, layer_id /* running */) { return 0.0; }

    // See pool_policy.
    virtual bool admits(expert_id /* newcomer */, expert_id /* victim */) { return true; }

    // Returns false if a layer may lose all of its experts to others; see resident_set.
    virtual bool has_quotas() const { return true; }

    // The policy of one pool; by default one that asks value() and admits(). The object must outlive it.
    virtual std::unique_ptr<pool_policy> make_pool(tier_id tier);
};

struct policy_traits {
    bool needs_prior = false; // the policy decides by the prior alone
};

// Gives a policy its name, in its own file.
using registered_policy = registered<cache_policy, policy_options, policy_traits>;

} // namespace hobbit
