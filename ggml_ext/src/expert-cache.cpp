// SPDX-License-Identifier: MIT
#include "expert-cache.h"

#include "weight-layout.h"

#include <algorithm>
#include <map>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats) :
    index_(index), loader_(loader), stats_(stats), n_experts_(index.n_experts()) {
    for (uint32_t tier = 0; tier < index.n_tiers(); tier++) {
        layouts_[tier] = lay_out(tier);
        loads_[tier].resize(index.n_layers() * n_experts_);
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

// The first layout that the device has for any part is that of all parts that can have it.
ggml_backend_buffer_type_t expert_cache::choose_packed(uint32_t tier, ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_[tier].assign(loads_[tier].size(), 0);
    for (uint32_t layer = 0; device && layer < index_.n_layers(); layer++) {
        const layer_shape & shape = index_.layer(layer);
        for (uint32_t part = 0; part < PART_COUNT; part++) {
            std::map<ggml_type, bool> is_packed;
            for (uint32_t e = 0; (shape.parts & part_bit(part)) && e < shape.n_experts; e++) {
                const ggml_type type = index_.locate(tier, layer, part, e).type;
                if (is_packed.count(type) == 0) {
                    const auto layout = packed_layout(device, type, shape.shapes[part], shape.n_experts);
                    chosen            = chosen ? chosen : layout;
                    is_packed[type]   = layout && layout == chosen;
                }
                packed_parts_[tier][index_of({ layer, e })] |= is_packed[type] ? part_bit(part) : 0;
            }
        }
    }
    return chosen;
}

status expert_cache::allocate(uint32_t tier, const pool_place & place, uint32_t n_slots, uint32_t floor,
                              cache_policy & policy) {
    sets_[tier].emplace(uint32_t(index_.n_layers()), n_experts_, tier, n_slots, floor, policy);
    return pools_[tier].allocate(place.buft, choose_packed(tier, place.packing), layouts_[tier].slot_size, n_slots);
}

bool expert_cache::holds(expert_id id, uint32_t tier, uint32_t parts) const {
    return sets_[tier] && sets_[tier]->contains(id) && (loader_.requested(load(id, tier)) & parts) == parts;
}

bool expert_cache::insert(expert_id id, uint32_t tier, resident_set::pressure how) {
    if (sets_[tier]->contains(id)) {
        return true;
    }
    const bool full = sets_[tier]->n_residents() == sets_[tier]->n_slots();
    expert_id  evicted;
    if (!sets_[tier]->insert(id, running_, how, &evicted)) {
        return false;
    }
    if (full) {
        loader_.reset(load(evicted, tier));
        stats_.evictions++;
    }
    return true;
}

bool expert_cache::acquire(expert_id id, uint32_t tier) {
    running_ = id.layer;
    reap_prefetches();
    if (!insert(id, tier, resident_set::pressure::urgent)) {
        drop_prefetches(); // what is on the way for another layer gives way
        if (!insert(id, tier, resident_set::pressure::urgent)) {
            return false;
        }
    }
    sets_[tier]->pin(id);
    sets_[tier]->touch(id);
    return true;
}

char * expert_cache::slot_of(expert_id id, uint32_t tier, uint32_t part) const {
    return pools_[tier].data(sets_[tier]->slot(id)) + layouts_[tier].offsets[id.layer][part];
}

void expert_cache::submit(expert_id id, uint32_t tier, uint32_t parts, load_urgency urgency) {
    for (uint32_t part = 0; part < PART_COUNT; part++) {
        if (parts & part_bit(part)) {
            part_target target = { slot_of(id, tier, part) };
            if (is_packed(id, tier, part)) {
                target.packed = pools_[tier].packed();
                target.shape  = index_.layer(id.layer).shapes[part];
            }
            loader_.submit(load(id, tier), part, index_.locate(tier, id.layer, part, id.expert), target, urgency);
        }
    }
}

void expert_cache::request(expert_id id, uint32_t tier, uint32_t parts) {
    GGML_ASSERT(sets_[tier]->is_pinned(id));
    submit(id, tier, parts, load_urgency::demand);
}

bool expert_cache::arrived(expert_id id, uint32_t tier, uint32_t parts) const {
    return loader_.arrived(load(id, tier), parts);
}

status expert_cache::wait(expert_id id, uint32_t tier, uint32_t parts) {
    return loader_.wait(load(id, tier), parts);
}

char * expert_cache::data(expert_id id, uint32_t tier, uint32_t part) const {
    GGML_ASSERT(sets_[tier]->is_pinned(id));
    const size_t before = loader::data_offset(index_.locate(tier, id.layer, part, id.expert));
    return slot_of(id, tier, part) + (is_packed(id, tier, part) ? 0 : before);
}

ggml_backend_buffer_t expert_cache::buffer(expert_id id, uint32_t tier, uint32_t part) const {
    return is_packed(id, tier, part) ? pools_[tier].packed() : pools_[tier].buffer();
}

void expert_cache::release(expert_id id, uint32_t tier) {
    loader_.abandon(load(id, tier));
    sets_[tier]->unpin(id);
}

//
// prefetch
//

bool expert_cache::prefetch(expert_id id, uint32_t tier, uint32_t parts) {
    reap_prefetches();
    if (!insert(id, tier, resident_set::pressure::polite)) {
        return false;
    }
    protect(id, tier);
    sets_[tier]->pin(id);
    prefetched_.push_back({ id, tier });
    submit(id, tier, parts, load_urgency::prefetch);
    return true;
}

void expert_cache::end_prefetch(uint32_t layer) {
    for (uint32_t tier = 0; tier < TIER_COUNT; tier++) {
        for (uint32_t e = 0; sets_[tier] && e < n_experts_; e++) {
            sets_[tier]->set_protected({ layer, e }, false);
        }
    }
    for (const tier_expert & p : prefetched_) {
        if (p.id.layer == layer) {
            loader_.cancel(load(p.id, p.tier));
        }
    }
    reap_prefetches();
}

// Those that have arrived or were cancelled need no pin any more.
void expert_cache::reap_prefetches() {
    const auto done = [&](const tier_expert & p) {
        if (!loader_.settled(load(p.id, p.tier))) {
            return false;
        }
        sets_[p.tier]->unpin(p.id);
        if (loader_.requested(load(p.id, p.tier)) == 0 && !sets_[p.tier]->is_pinned(p.id)) {
            sets_[p.tier]->erase(p.id); // nothing of it was read
        }
        return true;
    };
    prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), done), prefetched_.end());
}

void expert_cache::drop_prefetches() {
    for (const tier_expert & p : prefetched_) {
        loader_.abandon(load(p.id, p.tier));
    }
    reap_prefetches();
}

} // namespace hobbit
