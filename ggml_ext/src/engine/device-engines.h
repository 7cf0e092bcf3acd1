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
#include "predict/given-predictor.h"
#include "predict/prefetcher.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace hobbit {

// The engines of all devices that compute a model's experts, and their next-level cache in host memory. Assigns the
// layers to the devices and divides the limits on memory between them.
//
// Thread-safety: none; see expert_cache.
class device_engines {
  public:
    // All but the loader must outlive the object. REQUIRES: at least one device; several must have memory of their own
    device_engines(split_runner * runner, const std::vector<ggml_backend_dev_t> & devices, const expert_index & index,
                   const settings & config, loader & loader, stats & stats, ggml_backend_buffer_type_t transfer_memory);

    // Whether the pools are on devices with memory of their own.
    bool are_apart() const { return host_ != nullptr; }

    // See hobbit_place_layers. REQUIRES: called once, before the functions below
    void place_layers(const ggml_backend_dev_t * devices, size_t n_devices);

    // The engine that computes the block's experts; any engine for a block without experts.
    device_engine & of_block(int64_t block) const;

    // REQUIRES: the layers are placed
    status set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                      const ggml_tensor * selection_bias, hobbit_gating gating);

    // What allocate() would do. `other` is what the host holds beside what the places take.
    status plan(const other_memory & other, uint32_t n_batch, hobbit_pool_plan & plan) const;

    // Plans and allocates all pools, and gives the CPU its share of the layers. `other` as above.
    status allocate(const other_memory & other, uint32_t n_batch, cache_policy & policy);

    // Creates the executors and begins to fill the pools, in this order. REQUIRES: allocated; `run` outlives the
    // object.
    void start(run_state & run, rule_options rule, const std::vector<expert_id> & most_used);

    // Computes a graph split on one of the backend's devices; see moe_executor. REQUIRES: started
    status compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu);

    // See hobbit_set_prediction.
    void set_prediction(given_routing given) { given_ = std::move(given); }

    bool has_low_pool() const;

    // Sets the fields that concern pools and devices.
    void describe(hobbit_info & info) const;

    const std::vector<std::unique_ptr<device_engine>> & all() const { return places_; }

  private:
    struct memory_plan {
        std::vector<pool_slots> n_slots; // [place]
        pool_slots              n_host_slots = {};
    };

    std::optional<layer_id> find_layer(int64_t block) const;
    std::vector<layer_id>   all_layers() const;
    uint64_t                host_rows(uint32_t n_batch) const;
    uint64_t                pool_bytes(const memory_plan & plan) const;
    bool                    holds_all(const memory_plan & plan) const;
    status                  plan_all(other_memory other, uint32_t n_batch, memory_plan & plan) const;
    status                  plan_host(const other_memory & other, memory_plan & plan) const;
    status                  plan_devices(other_memory other, uint32_t n_batch, memory_plan & plan) const;
    status                  start_sharing(const pool_slots & host_slots);
    status                  allocate_pools(const memory_plan & plan, cache_policy & policy);
    void                    fill(const std::vector<expert_id> & most_used);

    const expert_index &                        index_;
    const settings &                            config_;
    stats &                                     stats_;
    stats                                       host_stats_; // counters of host_
    given_routing                               given_;      // of the next batch, for the predictor of that name
    const ggml_backend_buffer_type_t            transfer_memory_;
    std::unique_ptr<expert_cache>               host_;               // null: the pools themselves are in host memory
    std::optional<expert_shapes>                kinds_;              // if the CPU computes some experts
    std::unique_ptr<prefetcher>                 prefetcher_;         // null: no prefetch
    std::vector<std::unique_ptr<device_engine>> places_;             // one for each device
    std::vector<uint32_t>                       layer_places_;       // [layer], index of places_
    bool                                        is_filling_ = false; // the devices' pools
};

} // namespace hobbit
