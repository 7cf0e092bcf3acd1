// SPDX-License-Identifier: MIT
#include "engine/pool-planner.h"

#include "offload/cpu-rows.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

std::vector<layer_id> pool_planner::all_layers() const {
    std::vector<layer_id> all(index.n_layers());
    std::iota(all.begin(), all.end(), 0);
    return all;
}

// Rows of one batch, and copies of routers, in host memory: the pools' own, or those of the CPU's share.
uint64_t pool_planner::host_rows(uint32_t n_batch) const {
    if (!host) {
        return engines.front()->rows(n_batch);
    }
    const uint64_t n_used     = demand_of(index, *host, all_layers()).n_used;
    const uint32_t n_together = std::max(n_batch, uint32_t(inner_graph::enough_rows));
    uint64_t       bytes      = 0;
    for (const auto & engine : engines) {
        bytes += engine->n_layers() > 0 ? cpu_rows::size(index, n_batch * n_used, n_together) : 0;
    }
    return bytes;
}

status pool_planner::plan_devices(other_memory other, uint32_t n_batch, model_slots & slots) const {
    const pool_demand         behind = demand_of(index, *host, all_layers());
    std::vector<device_share> devices;
    for (const auto & engine : engines) {
        devices.push_back({ engine->demand(), engine->rows(n_batch) });
    }
    std::vector<budget> shared;
    HOBBIT_TRY(share_bounds(config.bounds(), devices, shared));
    for (size_t i = 0; i < engines.size(); i++) {
        pool_plan here;
        if (engines[i]->n_layers() > 0) {
            other.device = engines[i]->memory(devices[i].rows, behind);
            HOBBIT_TRY(plan_pools(shared[i], devices[i].demand, other, here));
            slots.host           = here.n_host_slots; // the same for each
            slots.snapshot_bytes = here.n_snapshots * other.snapshot;
        }
        slots.devices.push_back(here.n_slots);
    }
    return {};
}

status pool_planner::plan(other_memory other, uint32_t n_batch, model_slots & slots) const {
    other.scratch += host_rows(n_batch);
    if (host) {
        return plan_devices(other, n_batch, slots);
    }
    pool_plan here;
    HOBBIT_TRY(plan_pools(config.bounds(), engines.front()->demand(), other, here));
    slots.devices        = { here.n_slots };
    slots.snapshot_bytes = here.n_snapshots * other.snapshot;
    return {};
}

hobbit_pool_plan pool_planner::describe(const model_slots & slots, uint32_t n_batch) const {
    hobbit_pool_plan plan = { 0, host_rows(n_batch), true };
    for (size_t i = 0; i < engines.size(); i++) {
        const pool_slots & here = slots.devices[i];
        const pool_demand  d    = engines[i]->demand();
        for (const tier_id tier : index.tiers()) {
            plan.pool_bytes += here[tier] * d.slot_size[tier];
        }
        plan.batch_bytes += host && engines[i]->n_layers() > 0 ? engines[i]->rows(n_batch) : 0;
        plan.holds_all =
            plan.holds_all && here[tier_id::high] >= d.n_experts - d.n_absent && here[tier_id::low] >= d.n_absent;
    }
    return plan;
}

} // namespace hobbit
