// SPDX-License-Identifier: MIT
#pragma once

#include "backend/split-runner.h"
#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "engine/device-engine.h"
#include "execute/moe-executor.h"
#include "hobbit.h"
#include "model/expert-shapes.h"
#include "plan/memory-budget.h"
#include "predict/prefetcher.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace hobbit {

// The places of all devices that compute a model's experts, and the cache in host memory behind them. Decides which
// layer is whose and what each has of the bounds on memory; what is told to it reaches all places.
//
// Thread-safety: none; see expert_cache.
class device_engines {
  public:
    // All must outlive the object; the loader may end before. REQUIRES: devices is not empty, several of them have
    // memory of their own
    device_engines(split_runner * runner, const std::vector<ggml_backend_dev_t> & devices, const expert_index & index,
                   const settings & config, loader & loader, stats & stats, ggml_backend_buffer_type_t transfer_memory);

    // Whether the pools are on devices with memory of their own.
    bool are_apart() const { return host_ != nullptr; }

    // See hobbit_place_layers. REQUIRES: once, before anything of a layer
    void place_layers(const ggml_backend_dev_t * devices, size_t n_devices);

    // That has the block's experts; any one for a block without experts.
    device_engine & of_block(int64_t block) const;

    // REQUIRES: the layers are placed
    status set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                      const ggml_tensor * selection_bias, hobbit_gating gating);

    // Plans and allocates all pools, and gives the CPU its share of the layers. `other` is what the host holds beside
    // what the places take.
    status allocate(other_memory other, uint32_t n_batch, cache_policy & policy);

    // Begins to fill the pools. REQUIRES: allocated. What the executors share must outlive the object.
    void start(run_state & run, rule_options rule);

    // Runs a split of this device of the backend's; see moe_executor. REQUIRES: started
    status compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu);

    bool has_low_pool() const;

    // Fills in what is known of the pools.
    void describe(hobbit_info & info) const;

    const std::vector<std::unique_ptr<device_engine>> & all() const { return places_; }

  private:
    struct memory_plan {
        std::vector<pool_slots> n_slots; // [place]
        pool_slots              n_host_slots = {};
    };

    std::optional<layer_id> find_layer(int64_t block) const;
    std::vector<layer_id>   all_layers() const;
    status                  plan_host(other_memory other, uint32_t n_batch, memory_plan & plan) const;
    status                  plan_devices(other_memory other, uint32_t n_batch, memory_plan & plan) const;
    status                  start_sharing(const pool_slots & host_slots);
    status                  allocate_pools(const memory_plan & plan, cache_policy & policy);
    void                    fill();

    const expert_index &                        index_;
    const settings &                            config_;
    stats &                                     stats_;
    stats                                       host_stats_; // of host_ alone
    const ggml_backend_buffer_type_t            transfer_memory_;
    std::unique_ptr<expert_cache>               host_;         // null: the pools are in host memory themselves
    std::optional<expert_shapes>                kinds_;        // where the CPU has a share
    std::unique_ptr<prefetcher>                 prefetcher_;   // null: no prefetch
    std::vector<std::unique_ptr<device_engine>> places_;       // one for each device
    std::vector<uint32_t>                       layer_places_; // [layer], index of places_
};

} // namespace hobbit
