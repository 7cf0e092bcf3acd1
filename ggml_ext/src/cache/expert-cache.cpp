// SPDX-License-Identifier: MIT
#include "cache/expert-cache.h"

#include "ggml-impl.h"

#include <algorithm>

namespace hobbit {

expert_cache::expert_cache(const expert_index & index, loader & loader, stats & stats, const pool_place & place) :
    index_(index), loader_(loader), stats_(stats), place_(place), n_experts_(index.n_experts()) {
    const auto memory = place.memory ? place.memory : ggml_backend_dev_buffer_type(place.device);
    for (const term_id term : index.stored_terms()) {
        slots_[term].lay_out(index, term, place.device, memory, place.pack);
        loads_[term] = { index.n_layers(), n_experts_ };
    }
}

status expert_cache::allocate(term_id term, uint32_t n_slots, uint32_t quota, cache_policy & policy) {
    HOBBIT_TRY(slots_[term].allocate(n_slots, place_.spare));
    sets_.add(term, resident_set(uint32_t(index_.n_layers()), n_experts_, term, slots_[term].n_slots(), quota, policy));
    return {};
}

//
// residency
//

bool expert_cache::holds(expert_id id, tier_id tier, part_set parts) const {
    return sets_.contains(id, tier) && loader_.requested(load(id, term_of(tier))).has(parts);
}

bool expert_cache::holds_below(expert_id id, tier_id tier, part_set parts) const {
    const expert_cache * below = place_.below;
    const term_id        term  = term_of(tier);
    return below && (loader_.requested(load(id, term)) | loader_.requested(below->load(id, term))).has(parts);
}

void expert_cache::forget_evicted() {
    for (const expert_term & e : evicted_) {
        loader_.reset(load(e.id, e.term));
        if (place_.below) {
            place_.below->note_copy(e, false);
        }
    }
    evicted_.clear();
}

void expert_cache::report_evicted(const expert_term & newcomer) const {
    for (size_t i = 0; i < evicted_.size() && on_replacement_; i++) {
        on_replacement_(newcomer, evicted_[i]);
    }
}

// Other programs may have taken the memory for which the pool was planned: then it stays as large as it is.
void expert_cache::look_for_memory(term_id term) {
    const uint32_t fresh = sets_.set(term).fresh_slot();
    if (fresh == resident_set::none || fresh < index_.n_experts_used() || slots_[term].has_memory(fresh)) {
        return;
    }
    GGML_LOG_WARN("hobbit: memory is short: the pool of %s precision stays at %u experts\n", tier_name(tier_of(term)),
                  fresh);
    sets_.forget_fresh_slots(term);
}

bool expert_cache::make_resident(expert_id id, tier_id tier) {
    look_for_memory(term_of(tier));
    const bool is_resident = sets_.insert(id, tier, running_, evicted_);
    report_evicted({ id, term_of(tier) });
    stats_.evictions += evicted_.size();
    forget_evicted();
    return is_resident;
}

bool expert_cache::acquire(expert_id id, tier_id tier) {
    running_ = id.layer;
    reap_prefetches();
    if (!make_resident(id, tier)) {
        drop_prefetches(); // a demand takes their slots
        if (!make_resident(id, tier)) {
            return false;
        }
    }
    sets_.pin(id, tier);
    sets_.touch(id, tier);
    return true;
}

// Requests missing parts in the next-level cache. Returns the parts to copy from there.
part_set expert_cache::submit_below(expert_id id, term_id term, part_set parts, load_urgency urgency) {
    expert_cache & below   = *place_.below;
    const part_set missing = parts - loader_.requested(load(id, term));
    const part_set given   = missing && pin_below(id, term, urgency) ? missing : part_set();
    // an earlier request may have become more urgent
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
                             slots_[term].target(slot(id, term), id, part), urgency);
        } else {
            loader_.submit(load(id, term), part, at, slots_[term].target(slot(id, term), id, part), urgency);
        }
    }
}

void expert_cache::request(expert_id id, tier_id tier, part_set parts) {
    GGML_ASSERT(sets_.set(term_of(tier)).is_pinned(id));
    submit(id, term_of(tier), parts, load_urgency::demand);
}

bool expert_cache::arrived(expert_id id, tier_id tier, part_set parts) const {
    return loader_.arrived(load(id, term_of(tier)), parts);
}

status expert_cache::wait(expert_id id, tier_id tier, part_set parts) {
    return loader_.wait(load(id, term_of(tier)), parts);
}

loader::transfers expert_cache::transferred() const {
    return loader_.transferred(ggml_backend_buft_get_device(ggml_backend_dev_buffer_type(place_.device)));
}

char * expert_cache::data(expert_id id, term_id term, part_id part) const {
    GGML_ASSERT(sets_.set(term).is_pinned(id));
    return slots_[term].data(slot(id, term), id, part);
}

void expert_cache::release(expert_id id, tier_id tier) {
    cancel_below(id, term_of(tier));
    loader_.abandon(load(id, term_of(tier)));
    sets_.unpin(id, tier);
    unpin_below();
}

//
// the next-level cache
//

bool expert_cache::lend(expert_id id, term_id term, load_urgency urgency) {
    return urgency == load_urgency::demand ? acquire(id, tier_of(term)) : insert_ahead(id, term);
}

// Keeps the term's slot in the next-level cache until it has been copied.
bool expert_cache::pin_below(expert_id id, term_id term, load_urgency urgency) {
    if (place_.below->n_slots(term) == 0) {
        return false;
    }
    unpin_below();
    if (!place_.below->lend(id, term, urgency)) {
        return false;
    }
    staged_.push_back({ id, term });
    return true;
}

// Returns the terms that were copied, or whose copy was cancelled.
void expert_cache::unpin_below() {
    const auto done = [&](const expert_term & e) {
        if (!loader_.settled(load(e.id, e.term)) || !loader_.settled(place_.below->load(e.id, e.term))) {
            return false;
        }
        place_.below->unpin(e);
        if (place_.below->is_exclusive(e.term)) {
            const tier_id  tier  = tier_of(e.term);
            const part_set parts = index_.layer(e.id.layer).parts;
            place_.below->note_copy(e, holds(e.id, tier, parts) && arrived(e.id, tier, parts));
        }
        return true;
    };
    staged_.erase(std::remove_if(staged_.begin(), staged_.end(), done), staged_.end());
}

// To be called before the copy is cancelled, which waits for the read. A read that has begun is completed.
void expert_cache::cancel_below(expert_id id, term_id term) {
    if (place_.below) {
        loader_.cancel(place_.below->load(id, term));
    }
}

//
// prefetch
//

// Pins the term if it is resident, or becomes so by a polite insert; see resident_set.
bool expert_cache::insert_ahead(expert_id id, term_id term, bool is_reported) {
    look_for_memory(term);
    if (!sets_.set(term).contains(id) &&
        !sets_.insert_term(id, term, running_, resident_set::pressure::polite, evicted_)) {
        return false;
    }
    if (is_reported) {
        report_evicted({ id, term });
    }
    stats_.evictions += evicted_.size();
    forget_evicted();
    sets_.pin(id, tier_of(term));
    return true;
}

bool expert_cache::request_ahead(expert_id id, term_id term, part_set parts, bool is_reported) {
    if (!insert_ahead(id, term, is_reported)) {
        return false;
    }
    prefetched_.push_back({ id, term });
    submit(id, term, parts, load_urgency::prefetch);
    return true;
}

bool expert_cache::prefetch(expert_id id, term_id term, part_set parts) {
    reap_prefetches();
    if (!request_ahead(id, term, parts)) {
        return false;
    }
    protect(id, tier_of(term));
    return true;
}

bool expert_cache::upload(expert_id id, tier_id tier, part_set parts) {
    reap_prefetches();
    return prefetched_.empty() && request_ahead(id, term_of(tier), parts, true);
}

void expert_cache::fill(term_id term, const std::vector<expert_id> & experts) {
    const auto             has_room   = [&] { return sets_.has(term) && sets_.set(term).has_free_slot(); };
    const bool             is_through = place_.below && !place_.below->is_exclusive(term);
    std::vector<expert_id> brought;
    for (size_t i = 0; i < experts.size() && has_room(); i++) {
        const expert_id id    = experts[i];
        const part_set  parts = index_.layer(id.layer).parts;
        if (!index_.has(term, id) || !insert_ahead(id, term)) {
            continue;
        }
        brought.push_back(id);
        prefetched_.push_back({ id, term });
        submit_from(is_through ? submit_below(id, term, parts, load_urgency::prefetch) : part_set(), id, term, parts,
                    load_urgency::prefetch);
    }
    std::for_each(brought.rbegin(), brought.rend(), [&](expert_id id) { sets_.touch(id, tier_of(term)); });
}

status expert_cache::await_fill(const std::function<bool()> & is_aborted) {
    for (const expert_term & p : prefetched_) {
        do {
            if (is_aborted()) {
                return status::aborted();
            }
        } while (!loader_.settle(load(p.id, p.term)));
    }
    reap_prefetches();
    return {};
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

// Unpins the prefetches that have arrived or were cancelled.
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
    sets_.unpin(e.id, tier_of(e.term));
    drop_if_empty(e.id, e.term);
}

// Gives the slot back if nothing was read into it and nobody waits for it.
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
