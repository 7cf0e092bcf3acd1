// SPDX-License-Identifier: MIT
#include "expert-cache.h"

#include <algorithm>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats) :
    index_(index), loader_(loader), stats_(stats), n_experts_(index.n_experts()) {
    for (uint32_t tier = 0; tier < index.n_tiers(); tier++) {
        layouts_[tier] = lay_out(tier);
        entries_[tier].resize(index.n_layers() * n_experts_);
    }
}

// Types differ between layers and parts, and experts begin at any offset in their file: a part's place in the slot has
// room for the widest aligned span of its layer, and a slot for the widest layer.
expert_cache::tier_layout expert_cache::lay_out(uint32_t tier) const {
    tier_layout layout;
    layout.offsets.resize(index_.n_layers());
    for (size_t layer = 0; layer < index_.n_layers(); layer++) {
        const layer_shape & shape = index_.layer(layer);
        size_t              end   = 0;
        for (uint32_t part = 0; part < PART_COUNT; part++) {
            layout.offsets[layer][part] = end;
            size_t span                 = 0;
            for (uint32_t e = 0; (shape.parts & part_bit(part)) && e < shape.n_experts; e++) {
                span = std::max(span, loader::aligned_span(index_.locate(tier, layer, part, e)));
            }
            end += span;
        }
        layout.slot_size = std::max(layout.slot_size, end);
    }
    return layout;
}

status expert_cache::allocate(uint32_t tier, ggml_backend_buffer_type_t buft, uint32_t n_slots,
                              std::unique_ptr<cache_policy> policy) {
    policies_[tier] = std::move(policy);
    return pools_[tier].allocate(buft, layouts_[tier].slot_size, n_slots);
}

bool expert_cache::holds(expert_id id, uint32_t tier, uint32_t parts) const {
    const entry & e = find(id, tier);
    return e.slot >= 0 && (loader_.requested(e.load) & parts) == parts;
}

bool expert_cache::acquire(expert_id id, uint32_t tier) {
    entry & e = find(id, tier);
    if (e.slot < 0) {
        if (pools_[tier].n_free() == 0 && !evict_one(tier, id.layer)) {
            return false;
        }
        e.slot = int32_t(pools_[tier].take());
        residents_[tier].push_back(id);
        policies_[tier]->on_insert(id);
    }
    e.pins++;
    policies_[tier]->on_use(id);
    return true;
}

bool expert_cache::evict_one(uint32_t tier, uint32_t layer) {
    evictable_.clear();
    for (const expert_id & id : residents_[tier]) {
        if (find(id, tier).pins == 0) {
            evictable_.push_back(id);
        }
    }
    if (evictable_.empty()) {
        return false;
    }

    const expert_id victim = evictable_[policies_[tier]->pick_victim(evictable_, layer)];
    policies_[tier]->on_evict(victim);
    entry & e = find(victim, tier);
    pools_[tier].give(uint32_t(e.slot));
    e.slot = -1;
    loader_.reset(e.load);
    residents_[tier].erase(std::find(residents_[tier].begin(), residents_[tier].end(), victim));
    stats_.evictions++;
    return true;
}

void expert_cache::request(expert_id id, uint32_t tier, uint32_t parts) {
    entry & e = find(id, tier);
    GGML_ASSERT(e.pins > 0);
    for (uint32_t part = 0; part < PART_COUNT; part++) {
        if (parts & part_bit(part)) {
            char * dst = pools_[tier].data(uint32_t(e.slot)) + layouts_[tier].offsets[id.layer][part];
            loader_.submit(e.load, part, index_.locate(tier, id.layer, part, id.expert), dst, load_urgency::demand);
        }
    }
}

bool expert_cache::arrived(expert_id id, uint32_t tier, uint32_t parts) const {
    return loader_.arrived(find(id, tier).load, parts);
}

status expert_cache::wait(expert_id id, uint32_t tier, uint32_t parts) {
    return loader_.wait(find(id, tier).load, parts);
}

char * expert_cache::data(expert_id id, uint32_t tier, uint32_t part) const {
    const entry & e = find(id, tier);
    GGML_ASSERT(e.pins > 0);
    return pools_[tier].data(uint32_t(e.slot)) + layouts_[tier].offsets[id.layer][part] +
           loader::data_offset(index_.locate(tier, id.layer, part, id.expert));
}

void expert_cache::release(expert_id id, uint32_t tier) {
    entry & e = find(id, tier);
    GGML_ASSERT(e.pins > 0);
    loader_.settle(e.load);
    e.pins--;
}

} // namespace hobbit
