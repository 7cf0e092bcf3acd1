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
    for (const term_id term : index.terms()) {
        layouts_[term] = slot_layout(index, term, place.device, memory_);
        loads_[term].resize(index.n_layers() * n_experts_);
    }
}

//
// memory
//

// The first layout that the device has for any part is that of all parts that can have it.
ggml_backend_buffer_type_t expert_cache::choose_packed(term_id term) {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_[term].assign(loads_[term].size(), {});
    for (layer_id layer = 0; place_.pack && layer < index_.n_layers(); layer++) {
        const layer_shape & shape = index_.layer(layer);
        for (const part_id part : shape.parts) {
            std::map<ggml_type, bool> is_packed;
            for (uint32_t e = 0; e < shape.n_experts; e++) {
                const ggml_type type = index_.locate(term, layer, part, e).type;
                if (is_packed.count(type) == 0) {
                    const auto layout = packed_layout(place_.device, type, shape.shapes[part], shape.n_experts);
                    chosen            = chosen ? chosen : layout;
                    is_packed[type]   = layout && layout == chosen;
                }
                packed_parts_[term][index_of({ layer, e })] |= is_packed[type] ? part_set(part) : part_set();
            }
        }
    }
    return chosen;
}

status expert_cache::allocate(term_id term, uint32_t n_slots, uint32_t quota, cache_policy & policy) {
    slot_layout::bank_plan banks;
    const status           s = layouts_[term].plan_banks(n_slots, banks);
    if (!s.ok()) {
        return s;
    }
    sets_.add(term, resident_set(uint32_t(index_.n_layers()), n_experts_, term, banks.n_slots, quota, policy));
    const char * options =
        in_host_ ? "--pools or --memory" : "--pools or --device-memory, or see whether the device is still there";
    return pools_[term].allocate(memory_, choose_packed(term), banks.bank_size, banks.slots_per_bank, banks.n_slots,
                                 options);
}

//
// residency
//

bool expert_cache::holds(expert_id id, tier_id tier, part_set parts) const {
    const auto has_parts = [&](term_id t) { return loader_.requested(load(id, t)).has(parts); };
    return sets_.contains(id, tier) && std::all_of(terms(tier).begin(), terms(tier).end(), has_parts);
}

bool expert_cache::holds_below(expert_id id, tier_id tier, part_set parts) const {
    const expert_cache * below     = place_.below;
    const auto           has_parts = [&](term_id t) {
        return (loader_.requested(load(id, t)) | loader_.requested(below->load(id, t))).has(parts);
    };
    return below && std::all_of(terms(tier).begin(), terms(tier).end(), has_parts);
}

void expert_cache::forget_evicted() {
    for (const expert_term & e : evicted_) {
        loader_.reset(load(e.id, e.term));
        if (place_.below) {
            place_.below->sets_.set_duplicate(e.id, tier_of(e.term), false);
        }
    }
    evicted_.clear();
}

bool expert_cache::make_resident(expert_id id, tier_id tier) {
    const bool is_resident  = sets_.insert(id, tier, running_, evicted_);
    stats_.evictions       += evicted_.size();
    forget_evicted();
    return is_resident;
}

bool expert_cache::acquire(expert_id id, tier_id tier) {
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

char * expert_cache::slot_of(expert_id id, term_id term, part_id part) const {
    return pools_[term].bank(slot(id, term)) + layouts_[term].place(id.layer, part).offset +
           number(id, term) * stride(id, term, part);
}

part_target expert_cache::target(expert_id id, term_id term, part_id part) const {
    part_target t = { slot_of(id, term, part) };
    if (is_set(id, term, part)) {
        t.buffer = buffer(id, term, part);
        t.shape  = index_.layer(id.layer).shapes[part];
        t.zeros  = layouts_[term].place(id.layer, part).zeros;
    }
    return t;
}

// Asks the cache below for the parts that are missing here. Returns those that it gives.
part_set expert_cache::submit_below(expert_id id, term_id term, part_set parts, load_urgency urgency) {
    expert_cache & below   = *place_.below;
    const part_set missing = parts - loader_.requested(load(id, term));
    const part_set given   = missing && pin_below(id, term, urgency) ? missing : part_set();
    // what was asked for before may be more urgent now
    below.submit(id, term, given | (parts & loader_.requested(below.load(id, term))), urgency);
    return given;
}

void expert_cache::submit(expert_id id, term_id term, part_set parts, load_urgency urgency) {
    submit_from(place_.below ? submit_below(id, term, parts, urgency) : part_set(), id, term, parts, urgency);
}

void expert_cache::submit_from(part_set from_below, expert_id id, term_id term, part_set parts, load_urgency urgency) {
    expert_cache * below = place_.below;
    for (const part_id part : parts) {
        const part_location & at = index_.locate(term, id.layer, part, id.expert);
        if (from_below.has(part)) {
            loader_.transfer(load(id, term), part, below->load(id, term), below->data(id, term, part), at,
                             target(id, term, part), urgency);
        } else {
            loader_.submit(load(id, term), part, at, target(id, term, part), urgency);
        }
    }
}

void expert_cache::request(expert_id id, tier_id tier, part_set parts) {
    for (const term_id term : terms(tier)) {
        GGML_ASSERT(sets_.set(term).is_pinned(id));
        submit(id, term, parts, load_urgency::demand);
    }
}

bool expert_cache::arrived(expert_id id, tier_id tier, part_set parts) const {
    return std::all_of(terms(tier).begin(), terms(tier).end(),
                       [&](term_id term) { return loader_.arrived(load(id, term), parts); });
}

status expert_cache::wait(expert_id id, tier_id tier, part_set parts) {
    status s;
    for (const term_id term : terms(tier)) {
        s = s.ok() ? loader_.wait(load(id, term), parts) : s;
    }
    return s;
}

loader::transfers expert_cache::transferred() const {
    return loader_.transferred(ggml_backend_buft_get_device(ggml_backend_dev_buffer_type(place_.device)));
}

char * expert_cache::data(expert_id id, term_id term, part_id part) const {
    GGML_ASSERT(sets_.set(term).is_pinned(id));
    const size_t before = data_offset(index_.locate(term, id.layer, part, id.expert));
    return slot_of(id, term, part) + (is_set(id, term, part) ? 0 : before);
}

ggml_backend_buffer_t expert_cache::buffer(expert_id id, term_id term, part_id part) const {
    const slot_pool & pool = pools_[term];
    return is_packed(id, term, part) ? pool.packed(slot(id, term)) : pool.buffer(slot(id, term));
}

size_t expert_cache::stride(expert_id id, term_id term, part_id part) const {
    return layouts_[term].place(id.layer, part).stride;
}

uint32_t expert_cache::number(expert_id id, term_id term) const {
    return slot(id, term) % pools_[term].slots_per_bank();
}

void expert_cache::release(expert_id id, tier_id tier) {
    for (const term_id term : terms(tier)) {
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
bool expert_cache::pin_below(expert_id id, term_id term, load_urgency urgency) {
    expert_cache & below = *place_.below;
    if (below.n_slots(term) == 0) {
        return false;
    }
    const term_id front = terms(tier_of(term)).front();
    if (front != term && !below.sets_.set(front).contains(id)) {
        return false; // a residual would not stay there without its low version
    }
    unpin_below();
    if (urgency == load_urgency::demand ? !below.acquire(id, tier_of(term)) : !below.insert_ahead(id, term)) {
        return false;
    }
    staged_.push_back({ id, term });
    return true;
}

// What has been copied, or never will be.
void expert_cache::unpin_below() {
    const auto done = [&](const expert_term & e) {
        if (!loader_.settled(load(e.id, e.term)) || !loader_.settled(place_.below->load(e.id, e.term))) {
            return false;
        }
        place_.below->unpin(e);
        if (place_.below->duplicates_go_first_[e.term]) {
            const tier_id  tier  = tier_of(e.term);
            const part_set parts = index_.layer(e.id.layer).parts;
            place_.below->sets_.set_duplicate(e.id, tier, holds(e.id, tier, parts) && arrived(e.id, tier, parts));
        }
        return true;
    };
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), done), staged_.end());
}

// Before the copy that waits for it: what is half read there is read to its end.
void expert_cache::cancel_below(expert_id id, term_id term) {
    if (place_.below) {
        loader_.cancel(place_.below->load(id, term));
    }
}

//
// prefetch
//

// Pins the term where it is resident or polite enough to become so.
bool expert_cache::insert_ahead(expert_id id, term_id term) {
    if (!sets_.set(term).contains(id) &&
        !sets_.insert_term(id, term, running_, resident_set::pressure::polite, evicted_)) {
        return false;
    }
    stats_.evictions += evicted_.size();
    forget_evicted();
    sets_.pin(id, tier_of(term));
    return true;
}

// From the file, whatever the cache below has.
bool expert_cache::read_term(expert_id id, term_id term, part_set parts) {
    if (!insert_ahead(id, term)) {
        return false;
    }
    prefetched_.push_back({ id, term });
    submit_from({}, id, term, parts, load_urgency::prefetch);
    return true;
}

bool expert_cache::bring_term(expert_id id, term_id term, part_set parts) {
    if (!insert_ahead(id, term)) {
        return false;
    }
    prefetched_.push_back({ id, term });
    submit(id, term, parts, load_urgency::prefetch);
    return true;
}

bool expert_cache::prefetch(expert_id id, term_id term, part_set parts) {
    reap_prefetches();
    if (!bring_term(id, term, parts)) {
        return false;
    }
    protect(id, tier_of(term));
    if (on_prefetch_) {
        on_prefetch_({ id, term }, running_);
    }
    return true;
}

bool expert_cache::is_worth_bringing(term_id term) {
    return sets_.set(term).has_free_slot() || ++n_left_out_ % traits_of(place_.device).upload_interval == 0;
}

void expert_cache::bring(expert_id id, tier_id tier, part_set parts) {
    reap_prefetches();
    const auto & all = terms(tier);
    if (prefetched_.empty() && is_worth_bringing(all.back())) { // a residual has no place without its low version
        (void) std::all_of(all.begin(), all.end(), [&](term_id term) { return bring_term(id, term, parts); });
    }
    for (const term_id term : terms(tier)) {
        sets_.set_term_in_part(id, term, !is_whole(id, term));
    }
}

// Of a term.
bool expert_cache::is_whole(expert_id id, term_id term) const {
    return loader_.arrived(load(id, term), index_.layer(id.layer).parts);
}

void expert_cache::note_whole(expert_id id, tier_id tier) {
    for (const term_id term : terms(tier)) {
        if (is_whole(id, term)) {
            sets_.set_term_in_part(id, term, false);
        }
    }
}

void expert_cache::fill(term_id term, const std::vector<expert_id> & experts) {
    const auto             has_room   = [&] { return sets_.has(term) && sets_.set(term).has_free_slot(); };
    const bool             is_through = place_.below && !place_.below->duplicates_go_first_[term];
    std::vector<expert_id> brought;
    for (size_t i = 0; i < experts.size() && has_room(); i++) {
        const expert_id id    = experts[i];
        const part_set  parts = index_.layer(id.layer).parts;
        if (is_through ? bring_term(id, term, parts) : read_term(id, term, parts)) {
            brought.push_back(id);
        }
    }
    std::for_each(brought.rbegin(), brought.rend(), [&](expert_id id) { sets_.touch(id, tier_of(term)); });
}

void expert_cache::end_prefetch(layer_id layer) {
    sets_.end_protection(layer, n_experts_);
    for (const expert_term & p : prefetched_) {
        if (p.id.layer == layer) {
            cancel_below(p.id, p.term);
            loader_.cancel(load(p.id, p.term));
        }
    }
    reap_prefetches();
}

// Those that have arrived or were cancelled need no pin any more.
void expert_cache::reap_prefetches() {
    const auto done = [&](const expert_term & p) {
        if (!loader_.settled(load(p.id, p.term))) {
            return false;
        }
        unpin(p);
        return true;
    };
    prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), done), prefetched_.end());
}

void expert_cache::unpin(const expert_term & e) {
    const auto & all = terms(tier_of(e.term));
    sets_.unpin(e.id, tier_of(e.term));
    note_whole(e.id, tier_of(e.term));
    std::for_each(all.rbegin(), all.rend(), [&](term_id term) { drop_if_empty(e.id, term); });
}

// Nothing of it was read, and nobody waits for it.
void expert_cache::drop_if_empty(expert_id id, term_id term) {
    if (!loader_.requested(load(id, term)) && !sets_.set(term).is_pinned(id)) {
        sets_.erase_term(id, term, evicted_);
        forget_evicted();
    }
}

void expert_cache::drop_prefetches() {
    for (const expert_term & p : prefetched_) {
        cancel_below(p.id, p.term);
        loader_.abandon(load(p.id, p.term));
    }
    reap_prefetches();
}

} // namespace hobbit
