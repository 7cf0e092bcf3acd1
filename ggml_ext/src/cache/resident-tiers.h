// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-set.h"
#include "model/expert-index.h"

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// One version of an expert in the pool of its tier.
struct tier_expert {
    expert_id id;
    uint32_t  tier;
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

    void add(uint32_t tier, resident_set set) { sets_[tier].emplace(std::move(set)); }

    bool has(uint32_t tier) const { return sets_[tier].has_value(); }

    // REQUIRES: has(tier)
    const resident_set & set(uint32_t tier) const { return *sets_[tier]; }

    const std::vector<uint32_t> & terms(uint32_t tier) const { return terms_of(tier, high_is_residual_); }

    bool contains(expert_id id, uint32_t tier) const;

    // Gives every term that is not resident a slot while layer `running` runs, as urgent as can be. False, and nothing
    // changes, when one of the pools has none left to give. Who loses a slot is added to `evicted`.
    bool insert(expert_id id, uint32_t tier, uint32_t running, std::vector<tier_expert> & evicted);

    // The same for a term that is not resident. False also for a residual without its low version.
    bool insert_term(expert_id id, uint32_t tier, uint32_t running, resident_set::pressure how,
                     std::vector<tier_expert> & evicted);

    // Gives the slot of a term back, and that of the residual with the low version's: both are added to `evicted`.
    // REQUIRES: resident and not pinned.
    void erase_term(expert_id id, uint32_t tier, std::vector<tier_expert> & evicted);

    // REQUIRES: contains(id, tier)
    void touch(expert_id id, uint32_t tier);
    void pin(expert_id id, uint32_t tier);
    void unpin(expert_id id, uint32_t tier);
    void protect(expert_id id, uint32_t tier);

    // For those of the expert's terms that are resident.
    void set_duplicate(expert_id id, uint32_t tier, bool on);

    // Of a term, if it is resident.
    void set_term_in_part(expert_id id, uint32_t tier, bool on);

    // For a copy that goes its own way; see resident_set.
    void drop_marks();

    // Of a whole layer.
    void end_protection(uint32_t layer, uint32_t n_experts);

  private:
    void drop_residual(expert_id id, std::vector<tier_expert> & evicted);

    const bool                                          high_is_residual_;
    std::array<std::optional<resident_set>, TIER_COUNT> sets_;
};

} // namespace hobbit
