// SPDX-License-Identifier: MIT
#include "cache/expert-cache.h"

#include <algorithm>
#include <map>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats, const pool_place & place) :
    index_(index), loader_(loader), stats_(stats), place_(place), n_experts_(index.n_experts()) {
    const auto memory = place.memory ? place.memory : ggml_backend_dev_buffer_type(place.device);
    for (const tier_id tier : index.tiers()) {
        std::vector<uint64_t> sizes; // [layer]
        for (const layer_id layer : index.layers()) {
            sizes.push_back(slot_layout(index, tier, { layer }, place.device, memory).slot_size());
        }
        classes_[tier] = classes_of(sizes, n_experts_, index.n_experts_used());
        std::map<uint32_t, std::vector<layer_id>> layers; // [class]
        for (const layer_id layer : index.layers()) {
            layers[classes_[tier][layer]].push_back(layer);
        }
        for (const auto & each : layers) {
            slots_[tier].emplace_back(index, tier, each.second, place.device, memory, place.pack);
        }
        loads_[tier] = { index.n_layers(), n_experts_ };
    }
}

pool_demand expert_cache::demand(const std::vector<layer_id> & layers) const {
    pool_demand d;
    d.n_used = std::max(1u, std::min(index_.n_experts_used(), n_experts_));
    for (const tier_id tier : index_.tiers()) {
        d.classes[tier].resize(slots_[tier].size());
        for (const layer_id layer : layers) {
            const uint32_t number = classes_[tier][layer];
            slot_class &   c      = d.classes[tier][number];
            const uint32_t n_held = index_.n_held(tier, layer, layer);
            const bool     is_run = index_.layer(layer).is_run;

            c.size       = slots_[tier][number].slot_size();
            c.n_experts += is_run ? n_held : 0;
            c.n_layers++;
            d.n_absent += is_run && tier == tier_id::high ? index_.layer(layer).n_experts - n_held : 0;
        }
    }
    return d;
}

status expert_cache::allocate(tier_id tier, slot_numbers n_slots, const slot_classes & classes, uint32_t n_used,
                              cache_policy & policy) {
    for (size_t i = 0; i < n_slots.size(); i++) {
        HOBBIT_TRY(n_slots[i] > 0 ? slots_[tier][i].allocate(n_slots[i], place_.spare) : status());
        n_slots[i] = slots_[tier][i].n_slots();
    }
    sets_[tier].emplace(classes_[tier], n_experts_, tier, n_slots, classes, n_used, policy);
    return {};
}

status expert_cache::fit(tier_id tier, slot_numbers & n_slots) const {
    for (size_t i = 0; i < n_slots.size(); i++) {
        HOBBIT_TRY(slots_[tier][i].fit(n_slots[i]));
    }
    return {};
}

//
// residency
//

bool expert_cache::holds(expert_id id, tier_id tier, part_set parts) const {
    return is_resident(id, tier) && loader_.requested(load(id, tier)).has(parts);
}

bool expert_cache::holds_below(expert_id id, tier_id tier, part_set parts) const {
    const expert_cache * below = place_.below;
    return below && (loader_.requested(load(id, tier)) | loader_.requested(below->load(id, tier))).has(parts);
}

void expert_cache::forget(const expert_tier & evicted) {
    loader_.reset(load(evicted.id, evicted.tier));
    if (place_.below) {
        place_.below->note_copy(evicted, false);
    }
}

bool expert_cache::insert(expert_id id, tier_id tier, resident_set::pressure how, bool is_reported) {
    if (is_resident(id, tier)) {
        return true;
    }
    const bool  evicts  = !has_free_slot(id, tier);
    expert_tier evicted = { {}, tier };
    if (!sets_[tier]->insert(id, running_, how, &evicted.id)) {
        return false;
    }
    if (evicts) {
        if (is_reported && on_replacement_) {
            on_replacement_({ id, tier }, evicted);
        }
        stats_.evictions++;
        forget(evicted);
    }
    return true;
}

bool expert_cache::acquire(expert_id id, tier_id tier) {
    running_ = id.layer;
    reap_prefetches();
    if (!insert(id, tier, resident_set::pressure::urgent)) {
        drop_prefetches(); // a demand takes their slots
        if (!insert(id, tier, resident_set::pressure::urgent)) {
            return false;
        }
    }
    sets_[tier]->pin(id);
    sets_[tier]->touch(id);
    return true;
}

// Requests missing parts in the next-level cache. Returns the parts to copy from there.
part_set expert_cache::submit_below(expert_id id, tier_id tier, part_set parts, load_urgency urgency) {
    expert_cache & below   = *place_.below;
    const part_set missing = parts - loader_.requested(load(id, tier));
    const part_set given   = missing && pin_below(id, tier, urgency) ? missing : part_set();
    // an earlier request may have become more urgent
    below.submit(id, tier, given | (parts & loader_.requested(below.load(id, tier))), urgency);
    return given;
}

void expert_cache::submit(expert_id id, tier_id tier, part_set parts, load_urgency urgency, bool is_through) {
    expert_cache * below      = place_.below;
    const part_set from_below = below && is_through ? submit_below(id, tier, parts, urgency) : part_set();
    for (const part_id part : parts) {
        const part_location & at = index_.locate(tier, id.layer, part, id.expert);
        if (from_below.has(part)) {
            loader_.transfer(load(id, tier), part, below->load(id, tier), below->data(id, tier, part), at,
                             memory_of(id, tier).target(slot(id, tier), id, part), urgency);
        } else {
            loader_.submit(load(id, tier), part, at, memory_of(id, tier).target(slot(id, tier), id, part), urgency);
        }
    }
}

void expert_cache::request(expert_id id, tier_id tier, part_set parts) {
    GGML_ASSERT(sets_[tier]->is_pinned(id));
    submit(id, tier, parts, load_urgency::demand);
}

loader::transfers expert_cache::transferred() const {
    return loader_.transferred(ggml_backend_buft_get_device(ggml_backend_dev_buffer_type(place_.device)));
}

char * expert_cache::data(expert_id id, tier_id tier, part_id part) const {
    GGML_ASSERT(sets_[tier]->is_pinned(id));
    return memory_of(id, tier).data(slot(id, tier), id, part);
}

void expert_cache::release(expert_id id, tier_id tier) {
    cancel_below(id, tier);
    loader_.abandon(load(id, tier));
    sets_[tier]->unpin(id);
    unpin_below();
}

//
// the next-level cache
//

bool expert_cache::lend(expert_id id, tier_id tier, load_urgency urgency) {
    return urgency == load_urgency::demand ? acquire(id, tier) : insert_ahead(id, tier);
}

void expert_cache::note_copy(const expert_tier & e, bool is_above) {
    if (is_resident(e.id, e.tier)) {
        sets_[e.tier]->set_duplicate(e.id, is_above);
    }
}

// Keeps the expert's slot in the next-level cache until it has been copied.
bool expert_cache::pin_below(expert_id id, tier_id tier, load_urgency urgency) {
    if (place_.below->n_slots(tier) == 0) {
        return false;
    }
    unpin_below();
    if (!place_.below->lend(id, tier, urgency)) {
        return false;
    }
    staged_.push_back({ id, tier });
    return true;
}

// Returns the slots of experts that were copied, or whose copy was cancelled.
void expert_cache::unpin_below() {
    const auto done = [&](const expert_tier & e) {
        if (!loader_.settled(load(e.id, e.tier)) || !loader_.settled(place_.below->load(e.id, e.tier))) {
            return false;
        }
        place_.below->unpin(e);
        if (place_.below->is_exclusive_[e.tier]) {
            const part_set parts = index_.layer(e.id.layer).parts;
            place_.below->note_copy(e, holds(e.id, e.tier, parts) && arrived(e.id, e.tier, parts));
        }
        return true;
    };
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), done), staged_.end());
}

// To be called before the copy is cancelled, which waits for the read. A read that has begun is completed.
void expert_cache::cancel_below(expert_id id, tier_id tier) {
    if (place_.below) {
        loader_.cancel(place_.below->load(id, tier));
    }
}

//
// prefetch
//

// Pins the expert if it is resident, or becomes so without pressure.
bool expert_cache::insert_ahead(expert_id id, tier_id tier, bool is_reported) {
    if (!insert(id, tier, resident_set::pressure::polite, is_reported)) {
        return false;
    }
    sets_[tier]->pin(id);
    return true;
}

bool expert_cache::request_ahead(expert_id id, tier_id tier, part_set parts, bool is_reported, bool is_through) {
    if (!insert_ahead(id, tier, is_reported)) {
        return false;
    }
    prefetched_.push_back({ id, tier });
    submit(id, tier, parts, load_urgency::prefetch, is_through);
    return true;
}

bool expert_cache::prefetch(expert_id id, tier_id tier, part_set parts) {
    reap_prefetches();
    if (!request_ahead(id, tier, parts)) {
        return false;
    }
    protect(id, tier);
    return true;
}

bool expert_cache::upload(expert_id id, tier_id tier, part_set parts) {
    reap_prefetches();
    return prefetched_.empty() && request_ahead(id, tier, parts, true);
}

void expert_cache::fill(tier_id tier, const std::vector<expert_id> & experts) {
    const bool             is_through = place_.below && !place_.below->is_exclusive_[tier];
    std::vector<expert_id> brought;
    for (size_t i = 0; i < experts.size() && sets_[tier] && sets_[tier]->n_residents() < n_slots(tier); i++) {
        const expert_id id    = experts[i];
        const part_set  parts = index_.layer(id.layer).parts;
        if (has_free_slot(id, tier) && index_.has(tier, id) && request_ahead(id, tier, parts, false, is_through)) {
            brought.push_back(id);
        }
    }
    std::for_each(brought.rbegin(), brought.rend(), [&](expert_id id) { sets_[tier]->touch(id); });
}

status expert_cache::await_fill(const std::function<bool()> & is_aborted) {
    for (const expert_tier & p : prefetched_) {
        do {
            if (is_aborted()) {
                return status::aborted();
            }
        } while (!loader_.settle(load(p.id, p.tier)));
    }
    reap_prefetches();
    return {};
}

void expert_cache::end_prefetch(layer_id layer) {
    for (std::optional<resident_set> & set : sets_) {
        for (uint32_t e = 0; set && e < n_experts_; e++) {
            set->set_protected({ layer, e }, false);
        }
    }
    for (const expert_tier & p : prefetched_) {
        if (p.id.layer == layer) {
            cancel_below(p.id, p.tier);
            loader_.cancel(load(p.id, p.tier));
        }
    }
    reap_prefetches();
}

// Unpins the prefetches that have arrived or were cancelled.
void expert_cache::reap_prefetches() {
    const auto done = [&](const expert_tier & p) {
        if (!loader_.settled(load(p.id, p.tier))) {
            return false;
        }
        unpin(p);
        return true;
    };
    prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), done), prefetched_.end());
}

void expert_cache::unpin(const expert_tier & e) {
    resident_set & set = *sets_[e.tier];
    set.unpin(e.id);
    // gives the slot back if nothing was read into it and nobody waits for it
    if (!loader_.requested(load(e.id, e.tier)) && !set.is_pinned(e.id)) {
        set.erase(e.id);
        forget(e);
    }
}

void expert_cache::drop_prefetches() {
    for (const expert_tier & p : prefetched_) {
        cancel_below(p.id, p.tier);
        loader_.abandon(load(p.id, p.tier));
    }
    reap_prefetches();
}

} // namespace hobbit
