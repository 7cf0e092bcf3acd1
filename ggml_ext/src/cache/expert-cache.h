// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/resident-tiers.h"
#include "cache/slot-layout.h"
#include "cache/slot-pool.h"
#include "ggml-backend.h"
#include "io/loader.h"
#include "model/expert-index.h"
#include "policy/cache-policy.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// Which experts are in which pool. For each tier an expert is
//   absent    it has no slot;
//   resident  it has a slot, and of every part it is known whether it is there, on the way or not asked for.
// acquire makes an expert resident, evicting another one if need be; prefetch may do so too. A resident expert may be
// pinned, any number of times: it then keeps its slot. What is on the way is always pinned.
//
// Where the high tier is residual, an expert in it is two terms, each in the pool of its own tier: the low version and
// the residual. What is said of an expert in the high tier then goes for both; a residual is never resident without its
// low version (resident_tiers). No weight is held twice.
//
// The pools of a device with memory of its own may have a cache in host memory below them, which has these verbs as
// well. What is missing on the device then comes from there, and what is missing there is read into it first; where all
// of its slots are pinned, what is read passes it by. Both share one loader.
//
// Thread-safety: none; one thread computes at a time. The loader's threads only write into slots.
class expert_cache {
  public:
    // Where the pools are.
    struct pool_place {
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        bool               pack   = false;   // keeps weights in the CPU's own layouts, where it has one
        expert_cache *     below  = nullptr; // in host memory, in the file's layouts; null: what is missing is read

        ggml_backend_buffer_type_t memory = nullptr; // that the device computes in; null: its own
    };

    // All must outlive the cache.
    expert_cache(const expert_index & index, loader & loader, stats & stats, const pool_place & place);

    // Bytes of a slot that holds any expert of the tier, and those of a device's memory that a pool takes beside slots.
    size_t slot_size(term_id term) const { return layouts_[term].slot_size(); }
    size_t overhead(term_id term) const { return layouts_[term].overhead(); }

    // Gives the tier a pool, of fewer slots where a device would have to give more memory than so many and overhead().
    // A tier without one must not be acquired. The policy, which serves all tiers, must outlive the cache; for `quota`
    // see resident_set.
    status allocate(term_id term, uint32_t n_slots, uint32_t quota, cache_policy & policy);

    uint32_t n_slots(term_id term) const { return pools_[term].n_slots(); }

    // What reaches a cache above then goes first here: this one would otherwise have little else where it has no more
    // slots than those above. What leaves these soon is read again, so that it does not pay where it has more.
    void let_duplicates_go_first(term_id term) { duplicates_go_first_[term] = true; }

    // Whether all of `parts` are there or on the way.
    bool holds(expert_id id, tier_id tier, part_set parts) const;

    // Whether those of `parts` that are missing here are there, or on the way, in the cache below.
    bool holds_below(expert_id id, tier_id tier, part_set parts) const;

    // Pins the expert, without asking for parts. False, and nothing changes, when every slot of the pool is pinned by
    // acquire.
    bool acquire(expert_id id, tier_id tier);

    // Asks the loader for those of `parts` that are neither there nor on the way, of the first term first. REQUIRES:
    // pinned.
    void request(expert_id id, tier_id tier, part_set parts);

    // Whether, or until, parts asked for are there. REQUIRES: resident; to wait, pinned.
    bool   arrived(expert_id id, tier_id tier, part_set parts) const;
    status wait(expert_id id, tier_id tier, part_set parts);

    // To the pools' device, where it has memory of its own.
    loader::transfers transferred() const;

    // What a read failed with, if one did.
    status error() const { return loader_.error(); }

    // The part's weights in the term, of the type that the index says, in the layout of buffer()'s type: an address of
    // the device's. In one buffer they are evenly spaced: number() n lies n times stride() behind number 0. REQUIRES:
    // pinned, and the part is there.
    char *                data(expert_id id, term_id term, part_id part) const;
    ggml_backend_buffer_t buffer(expert_id id, term_id term, part_id part) const;
    size_t                stride(expert_id id, term_id term, part_id part) const;
    uint32_t              number(expert_id id, term_id term) const;

    // Undoes one acquire, once nothing asked for is on the way any more; what was only prefetched is dropped.
    void release(expert_id id, tier_id tier);

    // Asks the loader for parts of a term that a layer to come is predicted to need, after all demands, and protects
    // it. False, and nothing changes, when only pinned or protected experts could make room, and for a residual whose
    // low version is not resident.
    bool prefetch(expert_id id, term_id term, part_set parts);

    // Asks for an expert that may be needed again, in the same way but unprotected; nothing happens where anything that
    // was brought or prefetched is still on its way. Where that would stand in the way of what the device computes, and
    // another expert would have to go, most of these are left out. As long as only a part of it is here, it goes first.
    void bring(expert_id id, tier_id tier, part_set parts);

    // The residency of all experts, as the policies see it.
    const resident_tiers & residents() const { return sets_; }

    // Tells of each term that is prefetched, and of the layer that runs. An empty function ends it.
    void set_prefetch_listener(std::function<void(const expert_term & term, layer_id running)> listener) {
        on_prefetch_ = std::move(listener);
    }

    // Asks for experts in this order, after all demands, as long as slots are free. Before they are used, the first
    // ones go last. REQUIRES: for a residual tier, the low one was filled before.
    void fill(term_id term, const std::vector<expert_id> & experts);

    // A resident expert goes last, until end_prefetch.
    void protect(expert_id id, tier_id tier) { sets_.protect(id, tier); }

    // The layer's router has chosen: nothing of the layer is protected any more, and of what was prefetched for it the
    // reads not begun are dropped.
    void end_prefetch(layer_id layer);

  private:
    size_t index_of(expert_id id) const { return size_t(id.layer) * n_experts_ + id.expert; }

    const load_state & load(expert_id id, term_id term) const { return loads_[term][index_of(id)]; }
    load_state &       load(expert_id id, term_id term) { return loads_[term][index_of(id)]; }

    const std::vector<term_id> & terms(tier_id tier) const { return sets_.terms(tier); }

    bool is_packed(expert_id id, term_id term, part_id part) const {
        return packed_parts_[term][index_of(id)].has(part);
    }

    // Whether the loader sets what it has read, rather than reading it in place.
    bool is_set(expert_id id, term_id term, part_id part) const { return !in_host_ || is_packed(id, term, part); }

    uint32_t                   slot(expert_id id, term_id term) const { return sets_.set(term).slot(id); }
    char *                     slot_of(expert_id id, term_id term, part_id part) const;
    ggml_backend_buffer_type_t choose_packed(term_id term);
    bool                       make_resident(expert_id id, tier_id tier);
    void                       forget_evicted();
    part_target                target(expert_id id, term_id term, part_id part) const;
    void                       submit(expert_id id, term_id term, part_set parts, load_urgency urgency);
    part_set                   submit_below(expert_id id, term_id term, part_set parts, load_urgency urgency);
    void submit_from(part_set from_below, expert_id id, term_id term, part_set parts, load_urgency urgency);
    bool pin_below(expert_id id, term_id term, load_urgency urgency);
    void unpin_below();
    void cancel_below(expert_id id, term_id term);
    bool insert_ahead(expert_id id, term_id term);
    bool bring_term(expert_id id, term_id term, part_set parts);
    bool is_worth_bringing(term_id term);
    bool read_term(expert_id id, term_id term, part_set parts);
    void unpin(const expert_term & e);
    void drop_if_empty(expert_id id, term_id term);
    bool is_whole(expert_id id, term_id term) const;
    void note_whole(expert_id id, tier_id tier);
    void reap_prefetches();
    void drop_prefetches();

    const expert_index & index_;
    loader &             loader_;
    stats &              stats_;
    const pool_place     place_;
    const bool           in_host_; // the pools are in host memory

    const ggml_backend_buffer_type_t memory_; // of the pools
    const uint32_t                   n_experts_;
    layer_id                         running_; // layer of the last demand
    per_term<bool>                   duplicates_go_first_ = {};

    per_term<slot_layout>                              layouts_;
    per_term<slot_pool>                                pools_;
    resident_tiers                                     sets_;
    per_term<std::vector<load_state>>                  loads_;        // [term][layer * n_experts + expert], fixed size
    per_term<std::vector<part_set>>                    packed_parts_; // [term][layer * n_experts + expert]
    std::vector<expert_term>                           prefetched_; // terms; pinned once each, until there or cancelled
    uint64_t                                           n_left_out_ = 0; // by bring()
    std::vector<expert_term>                           staged_;         // terms; pinned below until they are here
    std::function<void(const expert_term &, layer_id)> on_prefetch_;    // see set_prefetch_listener
    std::vector<expert_term>                           evicted_;        // whose loads are still to be forgotten
};

} // namespace hobbit
