// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-set.h"
#include "model/expert-index.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// An expert in a tier.
struct tier_expert {
    expert_id id;
    tier_id   tier;
};

// A term of an expert, in its pool.
struct expert_term {
    expert_id id;
    term_id   term;
};

// The resident sets of all tiers as one. An expert in a tier is the sum of its terms (terms_of): what is said of an
// expert goes for all of them, what is said of a term for that one alone. Where the high tier is residual
//   a residual is resident only beside its low version, and leaves with it;
//   a pinned residual has a low version that is pinned at least as often.
//
// Thread-safety: none.
class resident_tiers {
  public:
    explicit resident_tiers(bool high_is_residual) : high_is_residual_(high_is_residual) {}

    void add(term_id term, resident_set set) { sets_[term].emplace(std::move(set)); }

    bool has(term_id term) const { return sets_[term].has_value(); }

    // REQUIRES: has(tier)
    const resident_set & set(term_id term) const { return *sets_[term]; }

    const std::vector<term_id> & terms(tier_id tier) const { return terms_of(tier, high_is_residual_); }

    bool contains(expert_id id, tier_id tier) const;

    // Gives every term that is not resident a slot while layer `running` runs, as urgent as can be. False, and nothing
    // changes, when one of the pools has none left to give. Who loses a slot is added to `evicted`.
    bool insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted);

    // The same for a term that is not resident. False also for a residual without its low version.
    bool insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                     std::vector<expert_term> & evicted);

    // Gives the slot of a term back, and that of the residual with the low version's: both are added to `evicted`.
    // REQUIRES: resident and not pinned.
    void erase_term(expert_id id, term_id term, std::vector<expert_term> & evicted);

    // REQUIRES: contains(id, tier)
    void touch(expert_id id, tier_id tier);
    void pin(expert_id id, tier_id tier);
    void unpin(expert_id id, tier_id tier);
    void protect(expert_id id, tier_id tier);

    // For those of the expert's terms that are resident.
    void set_duplicate(expert_id id, tier_id tier, bool on);

    // Of a term, if it is resident.
    void set_term_in_part(expert_id id, term_id term, bool on);

    // For a copy that goes its own way; see resident_set.
    void drop_marks();

    // Of a whole layer.
    void end_protection(layer_id layer, uint32_t n_experts);

  private:
    void drop_residual(expert_id id, std::vector<expert_term> & evicted);

    const bool                            high_is_residual_;
    per_term<std::optional<resident_set>> sets_;
};

} // namespace hobbit
