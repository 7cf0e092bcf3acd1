// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "model/expert.h"

#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <vector>

namespace hobbit {

// The layers of a tier whose experts have slots of one size.
struct slot_class {
    uint64_t size      = 0; // bytes of a slot
    uint32_t n_experts = 0; // experts of all these layers
    uint32_t n_layers  = 0;
};

using slot_classes = std::vector<slot_class>;
using slot_numbers = std::vector<uint32_t>; // [class]
using pool_slots   = per_tier<slot_numbers>;

// Numbers layers by the size of their experts, [layer], from the largest on. Experts of one class leave at most a
// twentieth of the largest one's slot empty. There is one class if the smallest pools of several would be more than a
// quarter of all experts. Pure.
std::vector<uint32_t> classes_of(const std::vector<uint64_t> & sizes, uint32_t n_experts, uint32_t n_used);

// The slots in so many bytes: what a token uses of each class, and of its other experts the same share as all. Pure.
// REQUIRES: bytes for the former
slot_numbers slots_in(const slot_classes & classes, uint32_t n_used, uint64_t bytes);

uint32_t count_of(const slot_numbers & numbers); // all

// Bytes of so many slots. `size` is the member of each of `classes` that tells a slot's. Pure; allocates nothing.
template <typename Classes, typename Size>
uint64_t bytes_of(const slot_numbers & numbers, const Classes & classes, Size size) {
    return std::inner_product(numbers.begin(), numbers.end(), classes.begin(), uint64_t(0), std::plus<>(),
                              [size](uint32_t n, const auto & each) { return n * std::invoke(size, each); });
}

// The user's bounds on memory, and what divides them between the two pools.
struct budget {
    uint64_t memory          = 0;     // bytes of the whole process; 0: computed
    uint64_t pools           = 0;     // bytes of the pools alone; 0: computed from the other bounds
    uint64_t device_memory   = 0;     // bytes on a device with its own memory; 0: computed
    double   low_share       = -1.0;  // share of the pools' bytes for the low tier; negative: computed from low_demand
    double   low_demand      = 0.0;   // slots of the low pool wanted for each slot of the high one; 0: nothing is low
    bool     low_if_short    = false; // no low pool where all high versions fit
    uint32_t snapshots       = 0;     // most snapshots of a sequence's state
    uint32_t least_snapshots = 0;
};

// The demand that the pools are planned from.
struct pool_demand {
    per_tier<slot_classes> classes;      // empty: there is no such tier
    uint32_t               n_used   = 0; // per token and layer
    uint32_t               n_absent = 0; // experts that have a low version alone

    slot_numbers all(tier_id tier) const { return slots_in(classes[tier], n_used, UINT64_MAX); }
    uint64_t bytes(tier_id tier, const slot_numbers & n) const { return bytes_of(n, classes[tier], &slot_class::size); }
    uint64_t all_bytes(tier_id tier) const { return bytes(tier, all(tier)); }
    uint64_t least_bytes(tier_id tier) const { return bytes(tier, slots_in(classes[tier], n_used, 0)); }
};

// A compute device with its own memory.
struct device_memory {
    const char * name = nullptr; // null: no such device, the pools are in host memory
    uint64_t     free = 0;
    uint64_t     rows = 0; // bytes of a batch's intermediate rows and of the copied routers

    pool_demand host = {}; // demand of the next-level cache in host memory
};

// Memory that the process takes beside the pools.
struct other_memory {
    uint64_t before    = 0; // resident when the model was opened
    uint64_t model     = 0; // non-expert weights, KV cache and compute buffers
    uint64_t scratch   = 0; // a batch's intermediate rows
    uint64_t now       = 0; // resident now
    uint64_t available = 0; // on this machine

    device_memory device = {};

    uint64_t limit       = UINT64_MAX; // the most that the process may hold
    uint64_t snapshot    = 0;          // bytes of one snapshot; 0: there are none
    bool     has_display = false;      // other programs of a person grow on this machine
};

struct pool_plan {
    pool_slots n_slots      = {};
    pool_slots n_host_slots = {}; // slots of the next-level cache
    uint64_t   n_snapshots  = 0;
};

// Refuses bounds above what the process may hold. is_apart: the pools are on a device with memory of its own. beside:
// bytes that the process holds beside its pools. Pure.
status check_limit(const budget & b, bool is_apart, uint64_t beside, uint64_t limit);

// Returns true if the low pool is used: by experts in low precision, or beside those in high precision, or in place of
// absent ones.
bool uses_low(const budget & b, const pool_demand & demand);

// Divides so many bytes between the two pools, or the smallest that work. Pure.
pool_slots divide_pools(const budget & b, const pool_demand & demand, uint64_t bytes);

// One of several devices that share the bounds.
struct device_share {
    pool_demand demand;
    uint64_t    rows = 0; // see device_memory
};

// Divides hobbit.pools and hobbit.device_memory between the devices. Each device gets its minimum, and a part of the
// rest in proportion to the bytes of its layers' experts beyond that minimum. A device without layers gets nothing.
// If a bound is below the sum of the minima, the error names that sum. Pure.
status share_bounds(const budget & b, const std::vector<device_share> & devices, std::vector<budget> & shared);

// Divides the budget between the pools. An error has a hobbit_shortage as its reason. The experts that one token uses
// in a layer must fit; if they do not, the error names the smallest budget that works. A pool has at most one slot per
// expert that its tier has. Where experts in high precision take slots of the low pool, the low pool has at least as
// many as the high one. The next-level cache gets no slots if host memory cannot hold that minimum. Snapshots come out
// of host memory: as many as are wanted, as far as a share of it or what is left beside all experts reaches, but not
// less than the least. Pure.
status plan_pools(const budget & b, const pool_demand & demand, const other_memory & other, pool_plan & plan);

// Assigns each layer to one of several devices. A given assignment stands. The devices take the other layers in runs of
// consecutive layers, in proportion to their free bytes, or evenly if all of these are 0. Pure. REQUIRES: free is not
// empty.
std::vector<uint32_t> assign_layers(const std::vector<std::optional<uint32_t>> & given,
                                    const std::vector<uint64_t> &                free);

} // namespace hobbit
