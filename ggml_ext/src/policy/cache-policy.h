// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "ggml.h"
#include "model/expert.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
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

// A resident expert that may be evicted. Candidates are ordered by value, and equal ones by their last touch.
struct candidate {
    expert_id id;
    uint64_t  touched;     // rises with each insert or use in the pool
    uint64_t  inserted;    // the number that on_insert gave
    double    value = 0.0; // see cache_policy

    bool operator<(const candidate & o) const { return std::tie(value, touched) < std::tie(o.value, o.touched); }
};

// An eviction policy. One object serves all pools, each the slots of a tier on one device: it hears the routing of
// every batch and keeps what the pools have in common. By default a pool evicts the least valuable candidate. Pure (no
// clock, lock or I/O), so that the simulator runs the same object as the engine.
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

    // The worth of keeping the expert in a pool of the tier while layer `running` runs, without a unit: only the order
    // counts. Only a prefetched expert may be unused so far.
    virtual double value(expert_id, tier_id, layer_id /* running */) { return 0.0; }

    // A pool gives the expert a slot, and keeps the number for the expert's candidate.
    virtual uint64_t on_insert(expert_id) { return 0; }

    // Returns true if the newcomer may take the victim's slot. A pool asks this for prefetches and other inserts in the
    // background, and drops them if refused. It never asks for a demand, because the expert is computed from its slot:
    // a policy that would refuse one makes it the next victim instead.
    virtual bool admits(expert_id /* newcomer */, expert_id /* victim */) { return true; }

    // The candidate to evict, of one or more of one pool. Unless refused by admits(), it is evicted.
    virtual expert_id victim(const std::vector<candidate> & candidates) {
        return std::min_element(candidates.begin(), candidates.end())->id;
    }

    // Returns false if a layer may lose all of its experts to others; see resident_set.
    virtual bool has_quotas() const { return true; }
};

struct policy_traits {
    bool needs_prior = false; // the policy decides by the prior alone
};

// Gives a policy its name, in its own file.
using registered_policy = registered<cache_policy, policy_options, policy_traits>;

// How a sequence has used one expert.
struct usage_record {
    uint32_t last_token  = 0; // number of the last token that used it, from 1; in a batch, the batch's last; 0: none
    uint32_t n_uses      = 0; // tokens
    uint32_t n_high_uses = 0; // tokens that it served in high precision
};

// The usage records of every sequence in progress. No call ends a sequence, so it is forgotten after `n_idle_max` calls
// of begin_tokens for others. Thread-safety: none.
class usage_records {
  public:
    static constexpr uint64_t n_idle_max = 256;

    usage_records(uint32_t n_layers, uint32_t n_experts) : n_layers_(n_layers), n_experts_(n_experts) {}

    // See cache_policy. begin_sequence may be left out for a new sequence.
    void begin_sequence(uint32_t number) {
        sequences_.erase(number);
        find(number);
    }

    void begin_tokens(uint32_t number, uint32_t n) {
        n_runs_++;
        sequence & s  = find(number);
        s.n_tokens   += n;
        s.last_run    = n_runs_;
        for (auto other = sequences_.begin(); other != sequences_.end();) {
            const bool is_idle = n_runs_ - other->second.last_run > n_idle_max;
            other              = is_idle ? sequences_.erase(other) : std::next(other);
        }
    }

    void on_use(const expert_usage & use) {
        sequence &     s  = find(use.sequence);
        usage_record & r  = s.records[use.id];
        r.last_token      = s.n_tokens;
        r.n_uses         += use.n_tokens;
        r.n_high_uses    += use.tier == tier_id::high ? use.n_tokens : 0;
    }

    // The largest score(record, tokens of the sequence) over all sequences; 0 without any.
    template <typename Score>
    double largest(expert_id id, Score score) const {
        double most = 0.0;
        for (const auto & [number, s] : sequences_) {
            const double value = score(s.records[id], s.n_tokens);
            most               = value > most ? value : most;
        }
        return most;
    }

    size_t n_sequences() const { return sequences_.size(); }

  private:
    struct sequence {
        uint32_t                   n_tokens = 0;
        uint64_t                   last_run = 0;
        expert_table<usage_record> records;
    };

    sequence & find(uint32_t number) {
        const auto [at, is_new] = sequences_.try_emplace(number);
        if (is_new) {
            at->second = { 0, n_runs_, { n_layers_, n_experts_ } };
        }
        return at->second;
    }

    const uint32_t               n_layers_;
    const uint32_t               n_experts_;
    std::map<uint32_t, sequence> sequences_;  // [number]
    uint64_t                     n_runs_ = 0; // calls of begin_tokens
};

// The experts that the last `capacity` tokens used, and their weights, to find tokens similar to the running one.
// Tokens are numbered in the order of add(). A token's slot, its number modulo the capacity, is its index in arrays.
//
// Memory: n_layers * (n_experts + 2 n_used + 2) * capacity bytes.
// Thread-safety: none.
class token_memory {
  public:
    static constexpr uint64_t none = UINT64_MAX;

    token_memory(uint32_t n_layers, uint32_t n_experts, uint32_t n_used, uint32_t capacity) :
        n_layers_(n_layers),
        n_experts_(n_experts),
        n_used_(n_used),
        capacity_(capacity),
        routes_(size_t(capacity) * n_layers * n_used),
        n_routes_(size_t(capacity) * n_layers, 0),
        roots_(size_t(n_layers) * n_experts * capacity, 0),
        before_(capacity, none),
        after_(capacity, none) {}

    // Begins a token that follows `before` in its sequence; `before` may be none or forgotten. The oldest token is
    // forgotten.
    uint64_t add(uint64_t before) {
        const uint64_t token = n_added_;
        visit_uses(token, [&](expert_id id) { root(id, slot(token)) = 0; }); // the slot's old token used it
        std::fill_n(n_routes_.begin() + ptrdiff_t(row(token, 0)), n_layers_, 0);
        n_added_++;
        before_[slot(token)] = known(before);
        after_[slot(token)]  = none;
        if (remembers(before)) {
            after_[slot(before)] = token;
        }
        return token;
    }

    // The token uses the expert with this share, 0 to 1, of its weight. At most n_used experts of a layer are kept.
    // REQUIRES: remembered.
    void use(uint64_t token, expert_id id, double weight) {
        GGML_ASSERT(remembers(token));
        const size_t i = row(token, id.layer);
        if (n_routes_[i] == n_used_) {
            return;
        }
        routes_[i * n_used_ + n_routes_[i]++] = uint16_t(id.expert);
        root(id, slot(token))                 = uint8_t(std::lround(255 * std::sqrt(std::clamp(weight, 0.0, 1.0))));
    }

    bool     remembers(uint64_t token) const { return token < n_added_ && token + capacity_ >= n_added_; }
    uint32_t slot(uint64_t token) const { return uint32_t(token % capacity_); }

    // The oldest remembered token, and one past the newest.
    uint64_t first() const { return n_added_ > capacity_ ? n_added_ - capacity_ : 0; }
    uint64_t last() const { return n_added_; }

    // The token before or after it in its sequence, or none. REQUIRES: remembered.
    uint64_t before(uint64_t token) const { return known(before_[slot(token)]); }
    uint64_t after(uint64_t token) const { return known(after_[slot(token)]); }

    // The similarity of two tokens in a layer sums, over the experts that both use, the root of the product of their
    // weights. Equal tokens have 1. Adds the term of one expert with this weight to scores[slot].
    void add_similarity(expert_id id, double weight, std::vector<float> & scores) const {
        const float     scale = float(std::sqrt(std::clamp(weight, 0.0, 1.0)) / 255);
        const uint8_t * roots = &roots_[(size_t(id.layer) * n_experts_ + id.expert) * capacity_];
        for (uint32_t slot = 0; slot < capacity_; slot++) {
            scores[slot] += scale * float(roots[slot]);
        }
    }

    // Calls visit(expert_id) for every expert that the token uses.
    template <typename Visit>
    void visit_uses(uint64_t token, Visit visit) const {
        for (layer_id layer; layer < n_layers_; layer++) {
            const size_t i = row(token, layer);
            for (uint32_t rank = 0; rank < n_routes_[i]; rank++) {
                visit(expert_id{ layer, routes_[i * n_used_ + rank] });
            }
        }
    }

  private:
    size_t    row(uint64_t token, layer_id layer) const { return slot(token) * size_t(n_layers_) + layer; }
    uint64_t  known(uint64_t token) const { return remembers(token) ? token : none; }
    uint8_t & root(expert_id id, uint32_t slot) {
        return roots_[(size_t(id.layer) * n_experts_ + id.expert) * capacity_ + slot];
    }

    const uint32_t n_layers_;
    const uint32_t n_experts_;
    const uint32_t n_used_;
    const uint32_t capacity_;

    std::vector<uint16_t> routes_;   // [(slot * n_layers + layer) * n_used + rank]
    std::vector<uint16_t> n_routes_; // [slot * n_layers + layer]
    std::vector<uint8_t>  roots_;    // [(layer * n_experts + expert) * capacity + slot] of weights, 1 is 255
    std::vector<uint64_t> before_;   // [slot]
    std::vector<uint64_t> after_;    // [slot]
    uint64_t              n_added_ = 0;
};

} // namespace hobbit
