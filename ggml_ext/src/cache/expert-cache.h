// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/resident-set.h"
#include "cache/slot-memory.h"
#include "ggml-backend.h"
#include "io/loader.h"
#include "model/expert-index.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"

#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

namespace hobbit {

// The experts that are resident in the pools of one device, and those that are being loaded. In each tier an expert is
//   absent    it has no slot;
//   resident  it has a slot, and each of its parts is loaded, being loaded, or not requested.
// acquire makes an expert resident and may evict another one; so may prefetch. A resident expert can be pinned any
// number of times, and then keeps its slot. An expert is pinned while any part of it is being loaded.
//
// The cache of a device with its own memory may have a next-level cache in host memory, `below`, of the same class. A
// miss is then uploaded from there; a miss there as well is first read into it, or past it if all its slots are pinned.
// Both share one loader.
//
// Thread-safety: none; one thread computes at a time. The loader's threads only write into slots.
class expert_cache {
  public:
    struct pool_place {
        ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        bool               pack   = false;   // use the CPU's own layouts for weights that have one
        expert_cache *     below  = nullptr; // the next-level cache, with the file's layouts; null: misses are read

        ggml_backend_buffer_type_t memory = nullptr; // the memory that the device computes in; null: its own
        uint64_t                   spare  = 0;       // see page_commit
    };

    // All must outlive the cache.
    expert_cache(const expert_index & index, loader & loader, stats & stats, const pool_place & place);

    // Input for the plan of the pools: the sizes of slots, with the experts of these layers that are run.
    pool_demand demand(const std::vector<layer_id> & layers) const;

    // Bytes of device memory that a pool takes beside its slots.
    size_t overhead(tier_id tier) const { return sum(tier, &slot_memory::overhead); }

    // Allocates the tier's pool, perhaps with fewer slots; see slot_memory. A tier without a pool must not be acquired.
    // The policy serves all tiers and must outlive the cache. n_slots: [class]. For the others see resident_set.
    status allocate(tier_id tier, slot_numbers n_slots, const slot_classes & classes, uint32_t n_used,
                    cache_policy & policy);

    // Returns true if the pools are in host memory, and experts lie there as far from a block's begin as in their file.
    bool in_host() const { return slots_[tier_id::high].front().in_host(); }

    uint32_t n_slots(tier_id tier) const { return sum(tier, &slot_memory::n_slots); }
    size_t   bytes(tier_id tier) const { return sum(tier, &slot_memory::bytes); } // bytes of all slots
    size_t   bytes(tier_id tier, const slot_numbers & numbers) const {            // bytes of so many
        return bytes_of(numbers, slots_[tier], &slot_memory::slot_size);
    }

    // Lessens the numbers to those of the slots that allocate would give the tier's pool.
    status fit(tier_id tier, slot_numbers & n_slots) const;

    //
    // demand
    //

    // Returns true if all of `parts` are loaded or being loaded.
    bool holds(expert_id id, tier_id tier, part_set parts) const;

    // Returns true if the next-level cache has, or is loading, those of `parts` that are missing here.
    bool holds_below(expert_id id, tier_id tier, part_set parts) const;

    // Pins the expert, without requesting parts. Returns false, and changes nothing, if acquire has pinned every slot.
    bool acquire(expert_id id, tier_id tier);

    // Requests those of `parts` that are neither loaded nor being loaded. REQUIRES: pinned
    void request(expert_id id, tier_id tier, part_set parts);

    // Returns true if all of the requested parts are loaded. REQUIRES: resident
    bool arrived(expert_id id, tier_id tier, part_set parts) const { return loader_.arrived(load(id, tier), parts); }

    // Says for each of the layer's experts whether all of `parts` are loaded, [expert].
    std::vector<bool> loaded(layer_id layer, tier_id tier, part_set parts) const {
        return loader_.arrived(&load({ layer, 0 }, tier), n_experts_, parts);
    }

    // Waits until they are, or until a read fails. REQUIRES: pinned
    status wait(expert_id id, tier_id tier, part_set parts) { return loader_.wait(load(id, tier), parts); }

    // Undoes one acquire, after the current read of the expert has ended. Drops requests that have not begun.
    void release(expert_id id, tier_id tier);

    // Uploads to the device, if it has its own memory.
    loader::transfers transferred() const;

    // The first error of a read.
    status error() const { return loader_.error(); }

    // A matrix in its slot; see slot_memory. REQUIRES: pinned, and the part is loaded.
    char * data(expert_id id, tier_id tier, part_id part) const;

    ggml_backend_buffer_t buffer(expert_id id, tier_id tier, part_id part) const {
        return memory_of(id, tier).buffer(slot(id, tier), id, part);
    }

    size_t stride(expert_id id, tier_id tier, part_id part) const { return memory_of(id, tier).stride(id.layer, part); }

    uint32_t number(expert_id id, tier_id tier) const { return memory_of(id, tier).number(slot(id, tier)); }
    uint32_t n_numbers(expert_id id, tier_id tier) const { return memory_of(id, tier).n_numbers(); }

    //
    // ahead of demand
    //

    // Requests parts of an expert that a later layer probably needs, after all demands, and protects it. Returns false
    // and changes nothing if only pinned or protected experts could make room, or if the policy refuses the expert.
    bool prefetch(expert_id id, tier_id tier, part_set parts);

    // Requests an expert for later use, after all demands and without protection. Returns false and changes nothing
    // while another prefetch or upload is unfinished, or if the policy refuses the expert.
    bool upload(expert_id id, tier_id tier, part_set parts);

    // Requests experts in this order, after all demands, while slots are free. Until they are used, the first ones are
    // evicted last.
    void fill(tier_id tier, const std::vector<expert_id> & experts);

    // Blocks until what fill() requested is there, or never will be. Ends early, within a second or so, if it
    // is aborted. REQUIRES: nothing else was requested ahead
    status await_fill(const std::function<bool()> & is_aborted);

    // A resident expert is evicted last, until end_prefetch.
    void protect(expert_id id, tier_id tier) { sets_[tier]->set_protected(id, true); }

    // The layer's router has chosen: ends the protection of the layer's experts, and drops its prefetches that have not
    // begun.
    void end_prefetch(layer_id layer);

    // REQUIRES: the tier has a pool
    bool has_free_slot(expert_id id, tier_id tier) const { return sets_[tier]->has_free_slot(id.layer); }

    // The listener hears of each expert that a demand or upload() evicts for another one. An empty function removes it.
    using replacement_listener = std::function<void(const expert_tier & newcomer, const expert_tier & victim)>;

    void set_replacement_listener(replacement_listener listener) { on_replacement_ = std::move(listener); }

    //
    // for the cache above, whose next-level cache this is
    //

    // Exclusive caching: what is resident above is evicted first here. It pays if this cache has no more slots than the
    // caches above, and otherwise causes reads of what these evict.
    void make_exclusive(tier_id tier) { is_exclusive_[tier] = true; }

    // Pins an expert that is to be copied from here. A demand evicts like acquire, a prefetch like prefetch. Returns
    // false if there is no slot. unpin undoes it. REQUIRES: the tier has a pool
    bool lend(expert_id id, tier_id tier, load_urgency urgency);
    void unpin(const expert_tier & e);

    // Requests parts of an expert, through the next-level cache or past it. REQUIRES: pinned
    void submit(expert_id id, tier_id tier, part_set parts, load_urgency urgency, bool is_through = true);

    // Notes whether the expert is resident above.
    void note_copy(const expert_tier & e, bool is_above);

    // How far the expert's reads are; see loader.
    const load_state & load(expert_id id, tier_id tier) const { return loads_[tier][id]; }
    load_state &       load(expert_id id, tier_id tier) { return loads_[tier][id]; }

  private:
    bool     is_resident(expert_id id, tier_id tier) const { return sets_[tier] && sets_[tier]->contains(id); }
    uint32_t slot(expert_id id, tier_id tier) const { return sets_[tier]->slot(id); }

    template <typename Number, typename Slots>
    Number sum(tier_id tier, Number (Slots::*of)() const) const {
        return std::accumulate(slots_[tier].begin(), slots_[tier].end(), Number(0),
                               [of](Number sum, const slot_memory & slots) { return sum + (slots.*of)(); });
    }

    const slot_memory & memory_of(expert_id id, tier_id tier) const { return slots_[tier][classes_[tier][id.layer]]; }

    bool     insert(expert_id id, tier_id tier, resident_set::pressure how, bool is_reported = true);
    void     forget(const expert_tier & evicted);
    part_set submit_below(expert_id id, tier_id tier, part_set parts, load_urgency urgency);
    bool     pin_below(expert_id id, tier_id tier, load_urgency urgency);
    void     unpin_below();
    void     cancel_below(expert_id id, tier_id tier);
    bool     insert_ahead(expert_id id, tier_id tier, bool is_reported = false);
    bool request_ahead(expert_id id, tier_id tier, part_set parts, bool is_reported = false, bool is_through = true);
    void reap_prefetches();
    void drop_prefetches();

    const expert_index & index_;
    loader &             loader_;
    stats &              stats_;
    const pool_place     place_;

    const uint32_t n_experts_;
    layer_id       running_; // the layer of the last demand
    per_tier<bool> is_exclusive_ = {};

    per_tier<std::vector<uint32_t>>       classes_;        // [layer]
    per_tier<std::deque<slot_memory>>     slots_;          // [class]
    per_tier<std::optional<resident_set>> sets_;           // empty: the tier has no pool
    per_tier<expert_table<load_state>>    loads_;          // tables of fixed size
    std::vector<expert_tier>              prefetched_;     // pinned once each, until loaded or cancelled
    std::vector<expert_tier>              staged_;         // lent by the cache below, until copied
    replacement_listener                  on_replacement_; // see set_replacement_listener
};

} // namespace hobbit
