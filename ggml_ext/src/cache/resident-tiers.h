// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-set.h"
#include "model/expert-index.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// A term of an expert, in its pool.
struct expert_term {
    expert_id id;
    term_id   term;
};

// The resident sets of all tiers as one.
//
// Thread-safety: none.
class resident_tiers {
  public:
    void add(term_id term, resident_set set) { sets_[term].emplace(std::move(set)); }

    bool has(term_id term) const { return sets_[term].has_value(); }

    // REQUIRES: has(term)
    const resident_set & set(term_id term) const { return *sets_[term]; }

    bool contains(expert_id id, tier_id tier) const {
        const auto & set = sets_[term_of(tier)];
        return set && set->contains(id);
    }

    // Makes the expert resident while layer `running` runs, by an urgent insert. Returns false and changes nothing if
    // all slots of the pool are pinned. The evicted expert is added to `evicted`. REQUIRES: the tier has a pool
    bool insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted);

    // Inserts a term, which is not resident; see resident_set.
    bool insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                     std::vector<expert_term> & evicted);

    // Evicts a term and adds it to `evicted`. REQUIRES: resident and not pinned.
    void erase_term(expert_id id, term_id term, std::vector<expert_term> & evicted);

    // REQUIRES: contains(id, tier)
    void touch(expert_id id, tier_id tier) { sets_[term_of(tier)]->touch(id); }
    void pin(expert_id id, tier_id tier) { sets_[term_of(tier)]->pin(id); }
    void unpin(expert_id id, tier_id tier) { sets_[term_of(tier)]->unpin(id); }
    void protect(expert_id id, tier_id tier) { sets_[term_of(tier)]->set_protected(id, true); }

    void forget_fresh_slots(term_id term) { sets_[term]->forget_fresh_slots(); }

    // Marks the expert if it is resident.
    void set_duplicate(expert_id id, tier_id tier, bool on);

    // Ends the protection of all experts of a layer.
    void end_protection(layer_id layer, uint32_t n_experts);

  private:
    per_term<std::optional<resident_set>> sets_;
};

} // namespace hobbit
