// SPDX-License-Identifier: MIT
#pragma once

#include "cache-policy.h"
#include "expert-index.h"
#include "ggml-backend.h"
#include "loader.h"
#include "slot-pool.h"
#include "stats.h"
#include "status.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace hobbit {

// Which experts are in which pool. For each tier an expert is
//   absent    it has no slot;
//   resident  it has a slot, and of every part it is known whether it is there, on the way or not asked for.
// acquire makes an expert resident, evicting another one if need be; only a later acquire can make it absent again.
// A resident expert may be pinned, any number of times: it then keeps its slot. What is on the way is always pinned.
//
// Thread-safety: none; one thread computes at a time. The loader's threads only write into slots.
class expert_cache {
  public:
    // All three must outlive the cache.
    expert_cache(const expert_index & index, loader & loader, stats & stats);

    // Bytes of a slot that holds any expert of the tier.
    size_t slot_size(uint32_t tier) const { return layouts_[tier].slot_size; }

    // Gives the tier a pool. A tier without one must not be acquired.
    status allocate(uint32_t tier, ggml_backend_buffer_type_t buft, uint32_t n_slots,
                    std::unique_ptr<cache_policy> policy);

    uint32_t n_slots(uint32_t tier) const { return pools_[tier].n_slots(); }

    // Whether all of `parts` are there or on the way.
    bool holds(expert_id id, uint32_t tier, uint32_t parts) const;

    // Pins the expert, without asking for parts. False, and nothing changes, when every slot of the pool is pinned.
    bool acquire(expert_id id, uint32_t tier);

    // Asks the loader for those of `parts` that are neither there nor on the way. REQUIRES: pinned.
    void request(expert_id id, uint32_t tier, uint32_t parts);

    // Whether, or until, parts asked for are there. REQUIRES: pinned.
    bool   arrived(expert_id id, uint32_t tier, uint32_t parts) const;
    status wait(expert_id id, uint32_t tier, uint32_t parts);

    // The part's weights as ggml lays them out, of the type that the index says. REQUIRES: pinned, and the part is
    // there.
    char *                data(expert_id id, uint32_t tier, uint32_t part) const;
    ggml_backend_buffer_t buffer(uint32_t tier) const { return pools_[tier].buffer(); }

    // Undoes one acquire, once nothing asked for is on the way any more.
    void release(expert_id id, uint32_t tier);

  private:
    struct entry {
        int32_t    slot = -1;
        uint32_t   pins = 0;
        load_state load;
    };

    struct tier_layout {
        size_t                                      slot_size = 0;
        std::vector<std::array<size_t, PART_COUNT>> offsets; // [layer][part], in a slot
    };

    const entry & find(expert_id id, uint32_t tier) const {
        return entries_[tier][size_t(id.layer) * n_experts_ + id.expert];
    }
    entry & find(expert_id id, uint32_t tier) { return entries_[tier][size_t(id.layer) * n_experts_ + id.expert]; }

    tier_layout lay_out(uint32_t tier) const;
    bool        evict_one(uint32_t tier, uint32_t layer);

    const expert_index & index_;
    loader &             loader_;
    stats &              stats_;
    const uint32_t       n_experts_;

    std::array<tier_layout, TIER_COUNT>                   layouts_;
    std::array<slot_pool, TIER_COUNT>                     pools_;
    std::array<std::unique_ptr<cache_policy>, TIER_COUNT> policies_;
    std::array<std::vector<entry>, TIER_COUNT>            entries_;   // [tier][layer * n_experts + expert], fixed size
    std::array<std::vector<expert_id>, TIER_COUNT>        residents_; // [tier], in no order
    std::vector<expert_id>                                evictable_; // scratch of evict_one
};

} // namespace hobbit
