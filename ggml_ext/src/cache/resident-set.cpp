// SPDX-License-Identifier: MIT
#include "cache/resident-set.h"

#include "ggml.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hobbit {

resident_set::resident_set(std::vector<uint32_t> numbers, uint32_t n_experts, tier_id tier,
                           const slot_numbers & n_slots, const slot_classes & classes, uint32_t n_used,
                           cache_policy & policy) :
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

bool resident_set::insert(expert_id id, layer_id running, pressure how, expert_id * evicted) {
    GGML_ASSERT(!contains(id));
    slot_numbers & free = free_[classes_[id.layer]];
    if (free.empty()) {
        expert_id victim;
        if (!pick_victim(id.layer, running, how, victim) || (how == pressure::polite && !policy_.admits(id, victim))) {
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

static constexpr uint32_t DUPLICATE = 0;
static constexpr uint32_t PROTECTED = 8;

// When the expert may be evicted for one of `layer`: a lower number earlier.
uint32_t resident_set::order_of(expert_id id, const entry & e, layer_id layer) const {
    const bool keeps_quota = id.layer != layer && held_[id.layer] <= quotas_[classes_[layer]];
    return (e.is_protected ? PROTECTED : 0) + (e.is_duplicate ? DUPLICATE : 1 + keeps_quota);
}

bool resident_set::pick_victim(layer_id layer, layer_id running, pressure how, expert_id & victim) {
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

void resident_set::erase(expert_id id) {
    entry &         e       = entries_[id];
    const expert_id last    = residents_.back();
    residents_[e.position]  = last;
    entries_[last].position = e.position;
    residents_.pop_back();
    free_[classes_[id.layer]].push_back(e.slot);
    held_[id.layer]--;
    e = {};
}

void resident_set::unpin(expert_id id) {
    entry & e = entries_[id];
    GGML_ASSERT(e.pins > 0);
    e.pins--;
}

uint32_t even_quota(uint32_t n_slots, uint32_t n_layers, uint32_t n_used) {
    if (n_layers == 1) {
        return n_used;
    }
    return std::min((n_slots - std::min(n_slots, n_used)) / (n_layers - 1), n_used);
}

} // namespace hobbit
