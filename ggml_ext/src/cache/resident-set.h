// SPDX-License-Identifier: MIT
#pragma once

#include "policy/cache-policy.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Which experts hold the slots of one tier's pool. Knows no memory and no files: the engine and the simulator use the
// same object.
//
// A resident expert may be
//   pinned     any number of times: it keeps its slot;
//   protected  it is predicted to be used: it goes only when nothing else can;
//   duplicate  it is in a cache above too: it goes first, and of several the most valuable, which stays there longest;
//   in part    not all of it is there: it goes as early.
// Beyond that the policy's value decides, the least recently inserted or used first where values are equal; but a layer
// that holds no more than `floor` experts loses none to another layer before all others have. Without floors a pool
// smaller than one token's cycle through all layers never hits.
//
// Thread-safety: none.
class resident_set {
  public:
    // The policy must outlive the set.
    resident_set(uint32_t n_layers, uint32_t n_experts, term_id term, uint32_t n_slots, uint32_t floor,
                 cache_policy & policy);

    static constexpr uint32_t none = UINT32_MAX;

    uint32_t n_slots() const { return n_slots_; }
    uint32_t n_residents() const { return uint32_t(residents_.size()); }

    bool has_free_slot() const { return !free_.empty(); }

    // Whether an urgent insert succeeds.
    bool has_room() const { return n_pinned_ < n_slots_; }

    bool     contains(expert_id id) const { return find(id).slot != none; }
    uint32_t slot(expert_id id) const { return find(id).slot; }
    bool     is_pinned(expert_id id) const { return find(id).pins > 0; }
    bool     is_protected(expert_id id) const { return find(id).is_protected; }
    bool     is_in_part(expert_id id) const { return find(id).is_in_part; }

    // How far making room may go.
    enum class pressure {
        polite, // leaves protected experts alone
        urgent, // takes them when nothing else is left
    };

    // Gives the expert, which is not resident, a slot while layer `running` runs. False, and nothing changes, when no
    // slot can be had. *evicted tells whose slot it was, or stays as it is when one was free.
    bool insert(expert_id id, layer_id running, pressure how, expert_id * evicted);

    // Gives the expert's slot back. REQUIRES: resident and not pinned.
    void erase(expert_id id);

    // For what comes before others where values are equal.
    void touch(expert_id id);

    // REQUIRES: resident; unpin undoes one pin.
    void pin(expert_id id) { n_pinned_ += find(id).pins++ == 0; }
    void unpin(expert_id id);
    void set_protected(expert_id id, bool on) { find(id).is_protected = on; }
    void set_duplicate(expert_id id, bool on) { find(id).is_duplicate = on; }
    void set_in_part(expert_id id, bool on) { find(id).is_in_part = on; }

    // Of all that is resident, nothing is pinned, protected or marked any more: for a copy that goes its own way.
    void drop_marks();

    const std::vector<expert_id> & residents() const { return residents_; } // in no order

  private:
    struct entry {
        uint32_t slot         = none;
        uint32_t position     = 0; // in residents_
        uint32_t pins         = 0;
        bool     is_protected = false;
        bool     is_duplicate = false;
        bool     is_in_part   = false;
        uint64_t touched      = 0;
    };

    const entry & find(expert_id id) const { return entries_[size_t(id.layer) * n_experts_ + id.expert]; }
    entry &       find(expert_id id) { return entries_[size_t(id.layer) * n_experts_ + id.expert]; }

    bool pick_victim(layer_id layer, layer_id running, pressure how, expert_id & victim);

    const uint32_t n_experts_;
    const term_id  term_;
    const uint32_t n_slots_;
    const uint32_t floor_;
    cache_policy & policy_;

    std::vector<entry>     entries_; // [layer * n_experts + expert]
    std::vector<expert_id> residents_;
    std::vector<uint32_t>  free_;         // slots
    std::vector<uint32_t>  held_;         // [layer]
    uint32_t               n_pinned_ = 0; // residents
    uint64_t               clock_    = 0; // of touches
};

// The largest floor, no more than one token's `n_used` experts, that all other layers can keep while one layer holds
// all that it uses. A higher one would be broken by each layer in turn, at the expense of the next: again nothing hits.
uint32_t even_floor(uint32_t n_slots, uint32_t n_layers, uint32_t n_used);

} // namespace hobbit
