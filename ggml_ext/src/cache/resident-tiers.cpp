// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

#include "ggml.h"

#include <algorithm>

namespace hobbit {

bool resident_tiers::contains(expert_id id, tier_id tier) const {
    const auto & all = terms(tier);
    return std::all_of(all.begin(), all.end(), [&](term_id t) { return sets_[t] && sets_[t]->contains(id); });
}

bool resident_tiers::insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted) {
    const auto & all = terms(tier);
    for (const term_id t : all) {
        if (!sets_[t]->contains(id) && !sets_[t]->has_room()) {
            return false;
        }
    }
    for (const term_id t : all) {
        if (!sets_[t]->contains(id)) {
            insert_term(id, t, running, resident_set::pressure::urgent, evicted);
        }
    }
    return true;
}

bool resident_tiers::insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                                 std::vector<expert_term> & evicted) {
    if (!has_base(id, term)) {
        return false;
    }
    const bool full = sets_[term]->n_residents() == sets_[term]->n_slots();
    expert_id  victim;
    if (!sets_[term]->insert(id, running, how, &victim)) {
        return false;
    }
    if (full) {
        evicted.push_back({ victim, term });
        drop_dependents(victim, term, evicted);
    }
    return true;
}

void resident_tiers::erase_term(expert_id id, term_id term, std::vector<expert_term> & evicted) {
    sets_[term]->erase(id);
    evicted.push_back({ id, term });
    drop_dependents(id, term, evicted);
}

// Evicts entries stored as a residual of `term`, which was evicted.
void resident_tiers::drop_dependents(expert_id id, term_id term, std::vector<expert_term> & evicted) {
    for (const term_id other : TERMS) {
        if (other != term && base_of(other) == term && sets_[other] && sets_[other]->contains(id)) {
            GGML_ASSERT(!sets_[other]->is_pinned(id));
            sets_[other]->erase(id);
            evicted.push_back({ id, other });
        }
    }
}

void resident_tiers::set_duplicate(expert_id id, tier_id tier, bool on) {
    for (const term_id t : terms(tier)) {
        if (sets_[t] && sets_[t]->contains(id)) {
            sets_[t]->set_duplicate(id, on);
        }
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
