// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "engine/device-engine.h"
#include "engine/settings.h"
#include "hobbit.h"
#include "model/expert-index.h"
#include "plan/memory-budget.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace hobbit {

// Slots of all pools of a model.
struct model_slots {
    std::vector<pool_slots> devices; // [engine]
    pool_slots              host           = {};
    uint64_t                snapshot_bytes = 0;
};

// Divides the limits on memory between the pools of a model's devices and of the cache in host memory behind them.
// Allocates nothing. Borrows its members for its life.
struct pool_planner {
    const expert_index &                                index;
    const settings &                                    config;
    const expert_cache *                                host; // null: the only engine computes in host memory
    const std::vector<std::unique_ptr<device_engine>> & engines;

    // `other`: host memory beside what the engines allocate.
    status plan(other_memory other, uint32_t n_batch, model_slots & slots) const;

    hobbit_pool_plan describe(const model_slots & slots, uint32_t n_batch) const;

    // The layers of all engines.
    std::vector<layer_id> all_layers() const;

  private:
    uint64_t host_rows(uint32_t n_batch) const;
    status   plan_devices(other_memory other, uint32_t n_batch, model_slots & slots) const;
};

} // namespace hobbit
