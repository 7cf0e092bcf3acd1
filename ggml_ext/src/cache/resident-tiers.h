// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-set.h"
#include "model/expert-index.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// A version of an expert, in its pool.
struct expert_tier {
    expert_id id;
    tier_id   tier;
};

// The resident sets of all tiers as one.
//
// Thread-safety: none.
class resident_tiers {
  public:
    void add(tier_id tier, resident_set set) { sets_[tier].emplace(std::move(set)); }

    bool has(tier_id tier) const { return sets_[tier].has_value(); }

    // REQUIRES: has(tier)
    const resident_set & set(tier_id tier) const { return *sets_[tier]; }

    bool contains(expert_id id, tier_id tier) const {
        const auto & set = sets_[tier];
        return set && set->contains(id);
    }

    // Makes the expert resident while layer `running` runs. Returns false and changes nothing if no slot can be had
    // this way; see resident_set. The evicted expert is added to `evicted`. REQUIRES: has(tier)
    bool insert(expert_id id, tier_id tier, layer_id running, resident_set::pressure how,
                std::vector<expert_tier> & evicted);

    // Evicts the expert and adds it to `evicted`. REQUIRES: resident and not pinned.
    void erase(expert_id id, tier_id tier, std::vector<expert_tier> & evicted);

    // REQUIRES: contains(id, tier)
    void touch(expert_id id, tier_id tier) { sets_[tier]->touch(id); }
    void pin(expert_id id, tier_id tier) { sets_[tier]->pin(id); }
    void unpin(expert_id id, tier_id tier) { sets_[tier]->unpin(id); }
    void protect(expert_id id, tier_id tier) { sets_[tier]->set_protected(id, true); }

    void forget_fresh_slots(tier_id tier) { sets_[tier]->forget_fresh_slots(); }

    // Marks the expert if it is resident.
    void set_duplicate(expert_id id, tier_id tier, bool on);

    // Ends the protection of all experts of a layer.
    void end_protection(layer_id layer, uint32_t n_experts);

  private:
    per_tier<std::optional<resident_set>> sets_;
};

} // namespace hobbit
