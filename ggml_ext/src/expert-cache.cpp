// SPDX-License-Identifier: MIT
#include "expert-cache.h"

#include "weight-layout.h"

#include <algorithm>
#include <map>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats) :
    index_(index), loader_(loader), stats_(stats), n_experts_(index.n_experts()), sets_(index.high_is_residual()) {
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
    sets_.add(tier, resident_set(uint32_t(index_.n_layers()), n_experts_, tier, n_slots, floor, policy));
    return pools_[tier].allocate(place.buft, choose_packed(tier, place.packing), layouts_[tier].slot_size, n_slots);
}

bool expert_cache::holds(expert_id id, uint32_t tier, uint32_t parts) const {
    const auto has_parts = [&](uint32_t t) { return (loader_.requested(load(id, t)) & parts) == parts; };
    return sets_.contains(id, tier) && std::all_of(terms(tier).begin(), terms(tier).end(), has_parts);
}

void expert_cache::forget_evicted() {
    for (const tier_expert & e : evicted_) {
        loader_.reset(load(e.id, e.tier));
    }
    evicted_.clear();
}

bool expert_cache::make_resident(expert_id id, uint32_t tier) {
    const bool is_resident  = sets_.insert(id, tier, running_, evicted_);
    stats_.evictions       += evicted_.size();
    forget_evicted();
    return is_resident;
}

bool expert_cache::acquire(expert_id id, uint32_t tier) {
    running_ = id.layer;
    reap_prefetches();
    if (!make_resident(id, tier)) {
        drop_prefetches(); // what is on the way for another layer gives way
        if (!make_resident(id, tier)) {
            return false;
        }
    }
    sets_.pin(id, tier);
    sets_.touch(id, tier);
    return true;
}

char * expert_cache::slot_of(expert_id id, uint32_t tier, uint32_t part) const {
    return pools_[tier].data(slot(id, tier)) + layouts_[tier].offsets[id.layer][part];
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
    for (const uint32_t term : terms(tier)) {
        GGML_ASSERT(sets_.set(term).is_pinned(id));
        submit(id, term, parts, load_urgency::demand);
    }
}

bool expert_cache::arrived(expert_id id, uint32_t tier, uint32_t parts) const {
    return std::all_of(terms(tier).begin(), terms(tier).end(),
                       [&](uint32_t term) { return loader_.arrived(load(id, term), parts); });
}

status expert_cache::wait(expert_id id, uint32_t tier, uint32_t parts) {
    status s;
    for (const uint32_t term : terms(tier)) {
        s = s.ok() ? loader_.wait(load(id, term), parts) : s;
    }
    return s;
}

char * expert_cache::data(expert_id id, uint32_t tier, uint32_t part) const {
    GGML_ASSERT(sets_.set(tier).is_pinned(id));
    const size_t before = loader::data_offset(index_.locate(tier, id.layer, part, id.expert));
    return slot_of(id, tier, part) + (is_packed(id, tier, part) ? 0 : before);
}

ggml_backend_buffer_t expert_cache::buffer(expert_id id, uint32_t tier, uint32_t part) const {
    return is_packed(id, tier, part) ? pools_[tier].packed() : pools_[tier].buffer();
}

void expert_cache::release(expert_id id, uint32_t tier) {
    for (const uint32_t term : terms(tier)) {
        loader_.abandon(load(id, term));
    }
    sets_.unpin(id, tier);
}

//
// prefetch
//

bool expert_cache::prefetch(expert_id id, uint32_t tier, uint32_t parts) {
    reap_prefetches();
    if (!sets_.set(tier).contains(id) &&
        !sets_.insert_term(id, tier, running_, resident_set::pressure::polite, evicted_)) {
        return false;
    }
    stats_.evictions += evicted_.size();
    forget_evicted();
    protect(id, tier);
    sets_.pin(id, tier);
    prefetched_.push_back({ id, tier });
    submit(id, tier, parts, load_urgency::prefetch);
    return true;
}

void expert_cache::end_prefetch(uint32_t layer) {
    sets_.end_protection(layer, n_experts_);
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
        sets_.unpin(p.id, p.tier);
        std::for_each(terms(p.tier).rbegin(), terms(p.tier).rend(), [&](uint32_t term) { drop_if_empty(p.id, term); });
        return true;
    };
    prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), done), prefetched_.end());
}

// Nothing of it was read, and nobody waits for it.
void expert_cache::drop_if_empty(expert_id id, uint32_t tier) {
    if (loader_.requested(load(id, tier)) == 0 && !sets_.set(tier).is_pinned(id)) {
        sets_.erase_term(id, tier, evicted_);
        forget_evicted();
    }
}

void expert_cache::drop_prefetches() {
    for (const tier_expert & p : prefetched_) {
        loader_.abandon(load(p.id, p.tier));
    }
    reap_prefetches();
}

} // namespace hobbit
