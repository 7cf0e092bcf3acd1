// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

namespace hobbit {

bool resident_tiers::insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted) {
    return contains(id, tier) || insert_term(id, term_of(tier), running, resident_set::pressure::urgent, evicted);
}

bool resident_tiers::insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                                 std::vector<expert_term> & evicted) {
    const bool full = sets_[term]->n_residents() == sets_[term]->n_slots();
    expert_id  victim;
    if (!sets_[term]->insert(id, running, how, &victim)) {
        return false;
    }
    if (full) {
        evicted.push_back({ victim, term });
    }
    return true;
}

void resident_tiers::erase_term(expert_id id, term_id term, std::vector<expert_term> & evicted) {
    sets_[term]->erase(id);
    evicted.push_back({ id, term });
}

void resident_tiers::set_duplicate(expert_id id, tier_id tier, bool on) {
    if (contains(id, tier)) {
        sets_[term_of(tier)]->set_duplicate(id, on);
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
