// SPDX-License-Identifier: MIT
#include "cache/resident-set.h"

#include "ggml.h"

#include <algorithm>
#include <tuple>

namespace hobbit {

resident_set::resident_set(uint32_t n_layers, uint32_t n_experts, term_id term, uint32_t n_slots, uint32_t floor,
                           cache_policy & policy) :
    n_experts_(n_experts),
    term_(term),
    n_slots_(n_slots),
    floor_(floor),
    policy_(policy),
    entries_(size_t(n_layers) * n_experts),
    held_(n_layers, 0) {
    for (uint32_t slot = n_slots; slot > 0; slot--) {
        free_.push_back(slot - 1);
    }
}

bool resident_set::insert(expert_id id, layer_id running, pressure how, expert_id * evicted) {
    GGML_ASSERT(!contains(id));
    if (free_.empty()) {
        expert_id victim;
        if (!pick_victim(id.layer, running, how, victim)) {
            return false;
        }
        erase(victim);
        *evicted = victim;
    }
    entry & e  = find(id);
    e          = {};
    e.slot     = free_.back();
    e.position = n_residents();
    e.touched  = ++clock_;
    free_.pop_back();
    residents_.push_back(id);
    held_[id.layer]++;
    return true;
}

bool resident_set::pick_victim(layer_id layer, layer_id running, pressure how, expert_id & victim) {
    using rank = std::tuple<bool, bool, bool, double, uint64_t>;
    rank least;
    bool found = false;
    for (const expert_id & id : residents_) {
        const entry & e = find(id);
        if (e.pins > 0 || (e.is_protected && how == pressure::polite)) {
            continue;
        }
        const bool   keeps_floor = id.layer != layer && held_[id.layer] <= floor_;
        const double value       = policy_.value(id, term_, running);
        const rank   r           = e.is_duplicate ? rank(e.is_protected, false, false, -value, ~e.touched)
                                                  : rank(e.is_protected, !e.is_in_part, keeps_floor, value, e.touched);
        if (!found || r < least) {
            least  = r;
            victim = id;
            found  = true;
        }
    }
    return found;
}

void resident_set::erase(expert_id id) {
    entry &         e      = find(id);
    const expert_id last   = residents_.back();
    residents_[e.position] = last;
    find(last).position    = e.position;
    residents_.pop_back();
    free_.push_back(e.slot);
    held_[id.layer]--;
    e = {};
}

void resident_set::touch(expert_id id) {
    find(id).touched = ++clock_;
}

void resident_set::unpin(expert_id id) {
    entry & e = find(id);
    GGML_ASSERT(e.pins > 0);
    n_pinned_ -= --e.pins == 0;
}

void resident_set::drop_marks() {
    for (const expert_id & id : residents_) {
        entry & e      = find(id);
        e.pins         = 0;
        e.is_protected = false;
        e.is_duplicate = false;
        e.is_in_part   = false;
    }
    n_pinned_ = 0;
}

uint32_t even_floor(uint32_t n_slots, uint32_t n_layers, uint32_t n_used) {
    if (n_layers == 1) {
        return n_used;
    }
    return std::min((n_slots - std::min(n_slots, n_used)) / (n_layers - 1), n_used);
}

} // namespace hobbit
