// SPDX-License-Identifier: MIT
#include "cache/expert-cache.h"

#include "device/device-traits.h"
#include "device/repacked-layout.h"
#include "io/aligned-range.h"

#include <algorithm>
#include <map>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats, const pool_place & place) :
    index_(index),
    loader_(loader),
    stats_(stats),
    place_(place),
    in_host_(is_host_device(place.device)),
    memory_(place.memory ? place.memory : ggml_backend_dev_buffer_type(place.device)),
    n_experts_(index.n_experts()),
    sets_(index.high_is_residual()) {
    for (uint32_t tier = 0; tier < index.n_tiers(); tier++) {
        layouts_[tier] = slot_layout(index, tier, place.device, memory_);
        loads_[tier].resize(index.n_layers() * n_experts_);
    }
}

//
// memory
//

// The first layout that the device has for any part is that of all parts that can have it.
ggml_backend_buffer_type_t expert_cache::choose_packed(uint32_t tier) {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_[tier].assign(loads_[tier].size(), 0);
    for (uint32_t layer = 0; place_.pack && layer < index_.n_layers(); layer++) {
        const layer_shape & shape = index_.layer(layer);
        for (uint32_t part = 0; part < PART_COUNT; part++) {
            std::map<ggml_type, bool> is_packed;
            for (uint32_t e = 0; (shape.parts & part_bit(part)) && e < shape.n_experts; e++) {
                const ggml_type type = index_.locate(tier, layer, part, e).type;
                if (is_packed.count(type) == 0) {
                    const auto layout = packed_layout(place_.device, type, shape.shapes[part], shape.n_experts);
                    chosen            = chosen ? chosen : layout;
                    is_packed[type]   = layout && layout == chosen;
                }
                packed_parts_[tier][index_of({ layer, e })] |= is_packed[type] ? part_bit(part) : 0;
            }
        }
    }
    return chosen;
}

status expert_cache::allocate(uint32_t tier, uint32_t n_slots, uint32_t floor, cache_policy & policy) {
    slot_layout::bank_plan banks;
    const status           s = layouts_[tier].plan_banks(n_slots, banks);
    if (!s.ok()) {
        return s;
    }
    sets_.add(tier, resident_set(uint32_t(index_.n_layers()), n_experts_, tier, banks.n_slots, floor, policy));
    const char * options =
        in_host_ ? "--pools or --memory" : "--pools or --device-memory, or see whether the device is still there";
    return pools_[tier].allocate(memory_, choose_packed(tier), banks.bank_size, banks.slots_per_bank, banks.n_slots,
                                 options);
}

//
// residency
//

bool expert_cache::holds(expert_id id, uint32_t tier, uint32_t parts) const {
    const auto has_parts = [&](uint32_t t) { return (loader_.requested(load(id, t)) & parts) == parts; };
    return sets_.contains(id, tier) && std::all_of(terms(tier).begin(), terms(tier).end(), has_parts);
}

bool expert_cache::holds_below(expert_id id, uint32_t tier, uint32_t parts) const {
    const expert_cache * below     = place_.below;
    const auto           has_parts = [&](uint32_t t) {
        const uint32_t here = loader_.requested(load(id, t));
        return ((here | loader_.requested(below->load(id, t))) & parts) == parts;
    };
    return below && std::all_of(terms(tier).begin(), terms(tier).end(), has_parts);
}

void expert_cache::forget_evicted() {
    for (const tier_expert & e : evicted_) {
        loader_.reset(load(e.id, e.tier));
        if (place_.below) {
            place_.below->sets_.set_duplicate(e.id, e.tier, false);
        }
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
    return pools_[tier].bank(slot(id, tier)) + layouts_[tier].place(id.layer, part).offset +
           number(id, tier) * stride(id, tier, part);
}

part_target expert_cache::target(expert_id id, uint32_t tier, uint32_t part) const {
    part_target t = { slot_of(id, tier, part) };
    if (is_set(id, tier, part)) {
        t.buffer = buffer(id, tier, part);
        t.shape  = index_.layer(id.layer).shapes[part];
        t.zeros  = layouts_[tier].place(id.layer, part).zeros;
    }
    return t;
}

// Asks the cache below for the parts that are missing here. Returns those that it gives.
uint32_t expert_cache::submit_below(expert_id id, uint32_t tier, uint32_t parts, load_urgency urgency) {
    expert_cache & below   = *place_.below;
    const uint32_t missing = parts & ~loader_.requested(load(id, tier));
    const uint32_t given   = missing && pin_below(id, tier, urgency) ? missing : 0;
    // what was asked for before may be more urgent now
    below.submit(id, tier, given | (parts & loader_.requested(below.load(id, tier))), urgency);
    return given;
}

void expert_cache::submit(expert_id id, uint32_t tier, uint32_t parts, load_urgency urgency) {
    submit_from(place_.below ? submit_below(id, tier, parts, urgency) : 0, id, tier, parts, urgency);
}

void expert_cache::submit_from(uint32_t from_below, expert_id id, uint32_t tier, uint32_t parts, load_urgency urgency) {
    expert_cache * below = place_.below;
    for (uint32_t part = 0; part < PART_COUNT; part++) {
        if (!(parts & part_bit(part))) {
            continue;
        }
        const part_location & at = index_.locate(tier, id.layer, part, id.expert);
        if (from_below & part_bit(part)) {
            loader_.transfer(load(id, tier), part, below->load(id, tier), below->data(id, tier, part), at,
                             target(id, tier, part), urgency);
        } else {
            loader_.submit(load(id, tier), part, at, target(id, tier, part), urgency);
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

loader::transfers expert_cache::transferred() const {
    return loader_.transferred(ggml_backend_buft_get_device(ggml_backend_dev_buffer_type(place_.device)));
}

char * expert_cache::data(expert_id id, uint32_t tier, uint32_t part) const {
    GGML_ASSERT(sets_.set(tier).is_pinned(id));
    const size_t before = data_offset(index_.locate(tier, id.layer, part, id.expert));
    return slot_of(id, tier, part) + (is_set(id, tier, part) ? 0 : before);
}

ggml_backend_buffer_t expert_cache::buffer(expert_id id, uint32_t tier, uint32_t part) const {
    const slot_pool & pool = pools_[tier];
    return is_packed(id, tier, part) ? pool.packed(slot(id, tier)) : pool.buffer(slot(id, tier));
}

size_t expert_cache::stride(expert_id id, uint32_t tier, uint32_t part) const {
    return layouts_[tier].place(id.layer, part).stride;
}

uint32_t expert_cache::number(expert_id id, uint32_t tier) const {
    return slot(id, tier) % pools_[tier].slots_per_bank();
}

void expert_cache::release(expert_id id, uint32_t tier) {
    for (const uint32_t term : terms(tier)) {
        cancel_below(id, term);
        loader_.abandon(load(id, term));
    }
    sets_.unpin(id, tier);
    note_whole(id, tier);
    unpin_below();
}

//
// the cache below
//

// So that the term keeps its slot there until it has been copied. False where there is none for it.
bool expert_cache::pin_below(expert_id id, uint32_t tier, load_urgency urgency) {
    expert_cache & below = *place_.below;
    if (below.n_slots(tier) == 0) {
        return false;
    }
    const uint32_t front = terms(tier).front();
    if (front != tier && !below.sets_.set(front).contains(id)) {
        return false; // a residual would not stay there without its low version
    }
    unpin_below();
    if (urgency == load_urgency::demand ? !below.acquire(id, tier) : !below.insert_ahead(id, tier)) {
        return false;
    }
    staged_.push_back({ id, tier });
    return true;
}

// What has been copied, or never will be.
void expert_cache::unpin_below() {
    const auto done = [&](const tier_expert & e) {
        if (!loader_.settled(load(e.id, e.tier)) || !loader_.settled(place_.below->load(e.id, e.tier))) {
            return false;
        }
        place_.below->unpin(e);
        if (place_.below->duplicates_go_first_[e.tier]) {
            const uint32_t parts = index_.layer(e.id.layer).parts;
            place_.below->sets_.set_duplicate(e.id, e.tier, holds(e.id, e.tier, parts) && arrived(e.id, e.tier, parts));
        }
        return true;
    };
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), done), staged_.end());
}

// Before the copy that waits for it: what is half read there is read to its end.
void expert_cache::cancel_below(expert_id id, uint32_t tier) {
    if (place_.below) {
        loader_.cancel(place_.below->load(id, tier));
    }
}

//
// prefetch
//

// Pins the term where it is resident or polite enough to become so.
bool expert_cache::insert_ahead(expert_id id, uint32_t tier) {
    if (!sets_.set(tier).contains(id) &&
        !sets_.insert_term(id, tier, running_, resident_set::pressure::polite, evicted_)) {
        return false;
    }
    stats_.evictions += evicted_.size();
    forget_evicted();
    sets_.pin(id, tier);
    return true;
}

// From the file, whatever the cache below has.
bool expert_cache::read_term(expert_id id, uint32_t tier, uint32_t parts) {
    if (!insert_ahead(id, tier)) {
        return false;
    }
    prefetched_.push_back({ id, tier });
    submit_from(0, id, tier, parts, load_urgency::prefetch);
    return true;
}

bool expert_cache::bring_term(expert_id id, uint32_t tier, uint32_t parts) {
    if (!insert_ahead(id, tier)) {
        return false;
    }
    prefetched_.push_back({ id, tier });
    submit(id, tier, parts, load_urgency::prefetch);
    return true;
}

bool expert_cache::prefetch(expert_id id, uint32_t tier, uint32_t parts) {
    reap_prefetches();
    if (!bring_term(id, tier, parts)) {
        return false;
    }
    protect(id, tier);
    if (on_prefetch_) {
        on_prefetch_({ id, tier }, running_);
    }
    return true;
}

bool expert_cache::is_worth_bringing(uint32_t tier) {
    return sets_.set(tier).has_free_slot() || ++n_left_out_ % traits_of(place_.device).upload_interval == 0;
}

void expert_cache::bring(expert_id id, uint32_t tier, uint32_t parts) {
    reap_prefetches();
    if (prefetched_.empty() && is_worth_bringing(tier)) {
        const auto & all = terms(tier); // a residual has no place without its low version
        (void) std::all_of(all.begin(), all.end(), [&](uint32_t term) { return bring_term(id, term, parts); });
    }
    for (const uint32_t term : terms(tier)) {
        sets_.set_term_in_part(id, term, !is_whole(id, term));
    }
}

// Of a term.
bool expert_cache::is_whole(expert_id id, uint32_t tier) const {
    return loader_.arrived(load(id, tier), index_.layer(id.layer).parts);
}

void expert_cache::note_whole(expert_id id, uint32_t tier) {
    for (const uint32_t term : terms(tier)) {
        if (is_whole(id, term)) {
            sets_.set_term_in_part(id, term, false);
        }
    }
}

void expert_cache::fill(uint32_t tier, const std::vector<expert_id> & experts) {
    const auto             has_room   = [&] { return sets_.has(tier) && sets_.set(tier).has_free_slot(); };
    const bool             is_through = place_.below && !place_.below->duplicates_go_first_[tier];
    std::vector<expert_id> brought;
    for (size_t i = 0; i < experts.size() && has_room(); i++) {
        const expert_id id    = experts[i];
        const uint32_t  parts = index_.layer(id.layer).parts;
        if (is_through ? bring_term(id, tier, parts) : read_term(id, tier, parts)) {
            brought.push_back(id);
        }
    }
    std::for_each(brought.rbegin(), brought.rend(), [&](expert_id id) { sets_.touch(id, tier); });
}

void expert_cache::end_prefetch(uint32_t layer) {
    sets_.end_protection(layer, n_experts_);
    for (const tier_expert & p : prefetched_) {
        if (p.id.layer == layer) {
            cancel_below(p.id, p.tier);
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
        unpin(p);
        return true;
    };
    prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), done), prefetched_.end());
}

void expert_cache::unpin(const tier_expert & e) {
    sets_.unpin(e.id, e.tier);
    note_whole(e.id, e.tier);
    std::for_each(terms(e.tier).rbegin(), terms(e.tier).rend(), [&](uint32_t term) { drop_if_empty(e.id, term); });
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
        cancel_below(p.id, p.tier);
        loader_.abandon(load(p.id, p.tier));
    }
    reap_prefetches();
}

} // namespace hobbit
