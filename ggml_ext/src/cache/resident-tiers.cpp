// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

#include "ggml.h"

#include <algorithm>

namespace hobbit {

bool resident_tiers::contains(expert_id id, uint32_t tier) const {
    const auto & all = terms(tier);
    return std::all_of(all.begin(), all.end(), [&](uint32_t t) { return sets_[t] && sets_[t]->contains(id); });
}

bool resident_tiers::insert(expert_id id, uint32_t tier, uint32_t running, std::vector<tier_expert> & evicted) {
    const auto & all = terms(tier);
    for (const uint32_t t : all) {
        if (!sets_[t]->contains(id) && !sets_[t]->has_room()) {
            return false;
        }
    }
    for (const uint32_t t : all) {
        if (!sets_[t]->contains(id)) {
            insert_term(id, t, running, resident_set::pressure::urgent, evicted);
        }
    }
    return true;
}

bool resident_tiers::insert_term(expert_id id, uint32_t tier, uint32_t running, resident_set::pressure how,
                                 std::vector<tier_expert> & evicted) {
    if (terms(tier).front() != tier && !sets_[terms(tier).front()]->contains(id)) {
        return false;
    }
    const bool full = sets_[tier]->n_residents() == sets_[tier]->n_slots();
    expert_id  victim;
    if (!sets_[tier]->insert(id, running, how, &victim)) {
        return false;
    }
    if (full) {
        evicted.push_back({ victim, tier });
        if (tier == TIER_LOW) {
            drop_residual(victim, evicted);
        }
    }
    return true;
}

void resident_tiers::erase_term(expert_id id, uint32_t tier, std::vector<tier_expert> & evicted) {
    sets_[tier]->erase(id);
    evicted.push_back({ id, tier });
    if (tier == TIER_LOW) {
        drop_residual(id, evicted);
    }
}

void resident_tiers::drop_residual(expert_id id, std::vector<tier_expert> & evicted) {
    if (high_is_residual_ && sets_[TIER_HIGH] && sets_[TIER_HIGH]->contains(id)) {
        GGML_ASSERT(!sets_[TIER_HIGH]->is_pinned(id));
        sets_[TIER_HIGH]->erase(id);
        evicted.push_back({ id, TIER_HIGH });
    }
}

void resident_tiers::touch(expert_id id, uint32_t tier) {
    for (const uint32_t t : terms(tier)) {
        sets_[t]->touch(id);
    }
}

void resident_tiers::pin(expert_id id, uint32_t tier) {
    for (const uint32_t t : terms(tier)) {
        sets_[t]->pin(id);
    }
}

void resident_tiers::unpin(expert_id id, uint32_t tier) {
    for (const uint32_t t : terms(tier)) {
        sets_[t]->unpin(id);
    }
}

void resident_tiers::protect(expert_id id, uint32_t tier) {
    for (const uint32_t t : terms(tier)) {
        sets_[t]->set_protected(id, true);
    }
}

void resident_tiers::set_duplicate(expert_id id, uint32_t tier, bool on) {
    for (const uint32_t t : terms(tier)) {
        if (sets_[t] && sets_[t]->contains(id)) {
            sets_[t]->set_duplicate(id, on);
        }
    }
}

void resident_tiers::set_term_in_part(expert_id id, uint32_t tier, bool on) {
    if (sets_[tier]->contains(id)) {
        sets_[tier]->set_in_part(id, on);
    }
}

void resident_tiers::drop_marks() {
    for (std::optional<resident_set> & set : sets_) {
        if (set) {
            set->drop_marks();
        }
    }
}

void resident_tiers::end_protection(uint32_t layer, uint32_t n_experts) {
    for (std::optional<resident_set> & set : sets_) {
        for (uint32_t e = 0; set && e < n_experts; e++) {
            set->set_protected({ layer, e }, false);
        }
    }
}

} // namespace hobbit
