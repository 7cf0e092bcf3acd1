// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <array>
#include <cstdint>
#include <vector>

namespace hobbit {

using pool_slots = std::array<uint32_t, 2>; // [tier]
using slot_sizes = std::array<uint64_t, 2>; // [tier]; 0: there is no such tier

// The bounds that a user gives, and what decides how the two pools share them.
struct budget {
    uint64_t memory        = 0;    // of the whole process; 0: computed
    uint64_t pools         = 0;    // of the pools alone; 0: computed from the others
    uint64_t device_memory = 0;    // of a device with memory of its own; 0: computed
    double   low_share     = -1.0; // of the pools, for the low one; negative: computed from t1
    double   t1            = 1.0;  // see score_thresholds
};

// What the pools are planned from.
struct pool_demand {
    slot_sizes slot_size = {};
    uint32_t   n_experts = 0; // of all layers
    uint32_t   n_used    = 0; // per token and layer

    bool high_is_residual = false; // an expert in high precision takes a slot in each pool
};

// The compute device, where it has memory of its own.
struct device_memory {
    const char * name = nullptr; // null: it has none, the pools are in host memory
    uint64_t     free = 0;
    uint64_t     rows = 0; // rows of a batch on their way through the experts, and a copy of the routers

    pool_demand host = {}; // of the cache in host memory behind it
};

// What the process holds beside the pools.
struct other_memory {
    uint64_t before    = 0; // resident when the model was opened
    uint64_t model     = 0; // non-expert weights, KV cache and compute buffers
    uint64_t scratch   = 0; // rows of a batch on their way through the experts
    uint64_t now       = 0; // resident now
    uint64_t available = 0; // that may still be taken

    device_memory device = {};
};

struct pool_plan {
    pool_slots n_slots      = {};
    pool_slots n_host_slots = {}; // behind a device with memory of its own
};

// Whether the low tier can ever be chosen, or is a part of the high one.
bool uses_low(const budget & b, const pool_demand & demand);

// One of several devices, as the bounds on all of them are shared.
struct device_share {
    pool_demand demand;
    uint64_t    rows = 0; // see device_memory
};

// hobbit.pools and hobbit.device_memory, as each device has them for itself: the least that works there, and of the
// rest a part in proportion to what its layers' experts would take beyond that. A device without layers gets nothing.
// An error, which names the smallest that works, where that is more than there is. Pure.
status share_bounds(const budget & b, const std::vector<device_share> & devices, std::vector<budget> & shared);

// Splits the budget between the pools: an error, which names the smallest that works, where one token's experts of a
// layer do not fit. Never more slots than experts, nor more residuals than low versions. Where those do not fit into
// host memory behind a device, there are no slots. Pure.
status plan_pools(const budget & b, const pool_demand & demand, const other_memory & other, pool_plan & plan);

} // namespace hobbit
