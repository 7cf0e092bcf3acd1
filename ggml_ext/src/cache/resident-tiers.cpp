// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

namespace hobbit {

bool resident_tiers::insert(expert_id id, tier_id tier, layer_id running, resident_set::pressure how,
                            std::vector<expert_tier> & evicted) {
    if (contains(id, tier)) {
        return true;
    }
    const bool full = sets_[tier]->n_residents() == sets_[tier]->n_slots();
    expert_id  victim;
    if (!sets_[tier]->insert(id, running, how, &victim)) {
        return false;
    }
    if (full) {
        evicted.push_back({ victim, tier });
    }
    return true;
}

void resident_tiers::erase(expert_id id, tier_id tier, std::vector<expert_tier> & evicted) {
    sets_[tier]->erase(id);
    evicted.push_back({ id, tier });
}

void resident_tiers::set_duplicate(expert_id id, tier_id tier, bool on) {
    if (contains(id, tier)) {
        sets_[tier]->set_duplicate(id, on);
    }
}

void resident_tiers::end_protection(layer_id layer, uint32_t n_experts) {
    for (std::optional<resident_set> & set : sets_) {
        for (uint32_t e = 0; set && e < n_experts; e++) {
            set->set_protected({ layer, e }, false);
        }
    }
}

} // namespace hobbit
