// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace hobbit {

// The largest quota, at most the `n_used` experts of one token, that all other layers can keep while one layer holds
// all experts that it uses. With a higher quota each layer in turn evicts experts of the next one: nothing hits again.
inline uint32_t even_quota(uint32_t n_slots, uint32_t n_layers, uint32_t n_used) {
    if (n_layers == 1) {
        return n_used;
    }
    return std::min((n_slots - std::min(n_slots, n_used)) / (n_layers - 1), n_used);
}

// The experts that hold the slots of one tier, without memory and files: engine and simulator share the class. Each
// class of layers has slots of its own, numbered from 0.
//
// A resident expert may be
//   pinned     any number of times: it is never evicted;
//   protected  a prediction says that it will be used: it is evicted only if no other expert can be;
//   duplicate  the pool is exclusive and a cache above holds the expert too: it is evicted before others, and the most
//              valuable duplicate first, because that one stays in the cache above longest.
// In addition each layer has a quota, unless the policy has none: while it holds no more experts than that, other
// layers evict from layers above their quota first. Without quotas, a pool smaller than one token's cycle through all
// layers never hits. The policy chooses among the experts that are equal in all of this.
//
// Thread-safety: none.
class resident_set {
  public:
    // numbers: [layer] of its class. n_slots: [class]. n_used: a token's, for quotas. The policy must outlive the set.
    resident_set(std::vector<uint32_t> numbers, uint32_t n_experts, tier_id tier, const slot_numbers & n_slots,
                 const slot_classes & classes, uint32_t n_used, cache_policy & policy) :
        classes_(std::move(numbers)),
        policy_(policy),
        tier_(tier),
        entries_(classes_.size(), n_experts),
        held_(classes_.size(), 0) {
        for (size_t i = 0; i < n_slots.size(); i++) {
            quotas_.push_back(policy.has_quotas() ? even_quota(n_slots[i], classes[i].n_layers, n_used) : 0);
            free_.emplace_back(n_slots[i]);
            std::iota(free_.back().rbegin(), free_.back().rend(), 0);
        }
    }

    static constexpr uint32_t none = UINT32_MAX;

    uint32_t n_residents() const { return uint32_t(residents_.size()); }

    bool has_free_slot(layer_id layer) const { return !free_[classes_[layer]].empty(); }

    bool     contains(expert_id id) const { return entries_[id].slot != none; }
    uint32_t slot(expert_id id) const { return entries_[id].slot; }
    bool     is_pinned(expert_id id) const { return entries_[id].pins > 0; }
    bool     is_protected(expert_id id) const { return entries_[id].is_protected; }

    // The experts that an insert may evict.
    enum class pressure {
        polite, // evicts neither protected entries nor those whose slot the policy refuses the newcomer: for background
        urgent, // evicts any entry that is not pinned: for demands
    };

    // Gives the expert a slot while layer `running` runs. Returns false and changes nothing if no slot is free and no
    // expert may be evicted. *evicted is the expert that lost its slot; it is not written if a slot was free.
    // REQUIRES: not resident.
    bool insert(expert_id id, layer_id running, pressure how, expert_id * evicted) {
        GGML_ASSERT(!contains(id));
        slot_numbers & free = free_[classes_[id.layer]];
        if (free.empty()) {
            expert_id victim;
            if (!pick_victim(id.layer, running, how, victim) ||
                (how == pressure::polite && !policy_.admits(id, victim))) {
                return false;
            }
            erase(victim);
            *evicted = victim;
        }
        entry & e  = entries_[id];
        e          = {};
        e.slot     = free.back();
        e.position = n_residents();
        e.touched  = ++clock_;
        free.pop_back();
        residents_.push_back(id);
        held_[id.layer]++;
        e.inserted = policy_.on_insert(id);
        return true;
    }

    // Evicts the expert. REQUIRES: resident and not pinned.
    void erase(expert_id id) {
        entry &         e       = entries_[id];
        const expert_id last    = residents_.back();
        residents_[e.position]  = last;
        entries_[last].position = e.position;
        residents_.pop_back();
        free_[classes_[id.layer]].push_back(e.slot);
        held_[id.layer]--;
        e = {};
    }

    // The expert is used. REQUIRES: resident.
    void touch(expert_id id) { entries_[id].touched = ++clock_; }

    // REQUIRES: resident; unpin undoes one pin.
    void pin(expert_id id) { entries_[id].pins++; }

    void unpin(expert_id id) {
        entry & e = entries_[id];
        GGML_ASSERT(e.pins > 0);
        e.pins--;
    }

    void set_protected(expert_id id, bool on) { entries_[id].is_protected = on; }
    void set_duplicate(expert_id id, bool on) { entries_[id].is_duplicate = on; }

    const std::vector<expert_id> & residents() const { return residents_; } // in no order

  private:
    static constexpr uint32_t DUPLICATE = 0; // see order_of
    static constexpr uint32_t PROTECTED = 8;

    struct entry {
        uint32_t slot         = none;
        uint32_t position     = 0; // in residents_
        uint32_t pins         = 0;
        bool     is_protected = false;
        bool     is_duplicate = false;
        uint64_t touched      = 0;
        uint64_t inserted     = 0; // see candidate
    };

    // When the expert may be evicted for one of `layer`: a lower number earlier.
    uint32_t order_of(expert_id id, const entry & e, layer_id layer) const {
        const bool keeps_quota = id.layer != layer && held_[id.layer] <= quotas_[classes_[layer]];
        return (e.is_protected ? PROTECTED : 0) + (e.is_duplicate ? DUPLICATE : 1 + keeps_quota);
    }

    bool pick_victim(layer_id layer, layer_id running, pressure how, expert_id & victim) {
        candidates_.clear();
        uint32_t first = UINT32_MAX;
        for (const expert_id & id : residents_) {
            const entry & e = entries_[id];
            if (classes_[id.layer] != classes_[layer] || e.pins > 0 || (e.is_protected && how == pressure::polite)) {
                continue;
            }
            const uint32_t order = order_of(id, e, layer);
            if (order < first) {
                first = order;
                candidates_.clear();
            }
            if (order == first) {
                candidates_.push_back({ id, e.touched, e.inserted });
            }
        }
        if (candidates_.empty()) {
            return false;
        }
        for (candidate & c : candidates_) { // once each: the values of the random policy change
            c.value = policy_.value(c.id, tier_, running);
        }
        const bool are_duplicates = first % PROTECTED == DUPLICATE;
        victim =
            are_duplicates ? std::max_element(candidates_.begin(), candidates_.end())->id : policy_.victim(candidates_);
        return true;
    }

    const std::vector<uint32_t> classes_; // [layer]
    std::vector<uint32_t>       quotas_;  // [class]
    cache_policy &              policy_;
    const tier_id               tier_;

    expert_table<entry>       entries_;
    std::vector<expert_id>    residents_;
    std::vector<slot_numbers> free_;       // [class] slots
    std::vector<uint32_t>     held_;       // [layer]
    uint64_t                  clock_ = 0;  // counts touches
    std::vector<candidate>    candidates_; // candidates of the last eviction
};

} // namespace hobbit
