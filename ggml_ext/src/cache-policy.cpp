// SPDX-License-Identifier: MIT
#include "cache-policy.h"

#include "ggml.h"

#include <algorithm>

namespace hobbit {

lru_policy::lru_policy(uint32_t n_layers, uint32_t n_experts, uint32_t floor) :
    n_experts_(n_experts), floor_(floor), last_use_(size_t(n_layers) * n_experts, 0), held_(n_layers, 0) {}

void lru_policy::on_use(expert_id id) {
    last_use_[size_t(id.layer) * n_experts_ + id.expert] = ++n_uses_;
}

void lru_policy::on_insert(expert_id id) {
    held_[id.layer]++;
}

void lru_policy::on_evict(expert_id id) {
    GGML_ASSERT(held_[id.layer] > 0);
    held_[id.layer]--;
}

size_t lru_policy::pick_victim(const std::vector<expert_id> & evictable, uint32_t layer) const {
    // an expert that its layer's floor protects comes after all others
    const auto rank = [&](const expert_id & id) {
        const bool is_protected = id.layer != layer && held_[id.layer] <= floor_;
        return std::make_pair(is_protected, last_use(id));
    };
    const auto victim = std::min_element(evictable.begin(), evictable.end(),
                                         [&](const expert_id & a, const expert_id & b) { return rank(a) < rank(b); });
    return victim - evictable.begin();
}

uint32_t even_floor(uint32_t n_slots, uint32_t n_layers, uint32_t n_used) {
    if (n_layers == 1) {
        return n_used;
    }
    return std::min((n_slots - std::min(n_slots, n_used)) / (n_layers - 1), n_used);
}

} // namespace hobbit
