// SPDX-License-Identifier: MIT
#pragma once

#include "backend/ggml-hobbit.h"
#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "engine/settings.h"
#include "execute/hits-ahead.h"
#include "execute/moe-executor.h"
#include "ggml-backend-impl.h"
#include "hobbit.h"
#include "io/loader.h"
#include "model/expert-index.h"
#include "offload/cpu-share.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"
#include "predict/predictor.h"
#include "predict/prefetcher.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace hobbit {

// State that the device engines of one model share. All must outlive them.
struct shared_parts {
    const expert_index & index;
    const settings &     config;
    loader &             reads;
    stats &              counters;
    expert_cache *       host; // the next-level cache of all; null: the only engine computes in host memory

    ggml_backend_buffer_type_t memory; // pools have this type where there is no such cache
};

// One device that computes experts: its layers, the pools with their experts, and the executor that runs them.
//
// Thread-safety: none; see expert_cache.
class device_engine {
  public:
    device_engine(split_runner * runner, ggml_backend_dev_t device, const shared_parts & shared);

    ggml_backend_dev_t device() const { return device_; }

    // The buffer type of the expert tensors that this engine computes. Its device is the backend's own.
    ggml_backend_buffer_type_t buffer_type() { return &buffer_type_; }

    const expert_cache & cache() const { return cache_; }
    expert_cache &       cache() { return cache_; }

    // Cache and predictor, for prefetching experts of this engine's layers. The predictor gets all layers' routers,
    // since prefetch crosses from device to device; null: no prefetch.
    prefetcher::layer_place ahead() { return { &cache_, predictor_.get() }; }

    // Adds a layer to compute, in ascending order. REQUIRES: before allocate.
    void add_layer(layer_id layer) { layers_.push_back(layer); }

    uint32_t n_layers() const { return uint32_t(layers_.size()); }

    pool_demand demand() const { return cache_.demand(layers_); }

    // Bytes of the device's memory that computing takes beside the pools, and of these the predictor's.
    uint64_t rows(uint32_t n_batch) const;
    uint64_t predictor_bytes() const { return predictor_ ? predictor_->bytes() : 0; }

    // Input for the plan of the device's pools. REQUIRES: the device has memory of its own
    device_memory memory(uint64_t rows, const pool_demand & host) const;

    // Gives the CPU a share of the layers. REQUIRES: there is a host cache
    void start_sharing();

    status allocate(const pool_slots & slots, cache_policy & policy);

    // Fills free slots with experts of its layers, in this order.
    void fill(tier_id tier, const std::vector<expert_id> & most_used);

    // REQUIRES: allocated. The arguments must outlive the engine; prefetcher may be null.
    void start(prefetcher * prefetcher, run_state & run);

    // REQUIRES: started
    moe_executor & executor() { return *executor_; }

    // slots: of the pools, as planned or allocated.
    hobbit_device_info info(const pool_slots & slots) const;

    // Measured times of experts on the device and the CPU; empty if the CPU has no share.
    std::vector<hobbit_latency> latencies() const {
        return share_ ? share_->latencies() : std::vector<hobbit_latency>();
    }

  private:
    const shared_parts            shared_;
    const ggml_backend_dev_t      device_;
    ggml_backend_buffer_type      buffer_type_;
    expert_cache                  cache_;
    std::unique_ptr<predictor>    predictor_; // null: no prefetch
    std::unique_ptr<hits_ahead>   ahead_;
    std::unique_ptr<cpu_share>    share_; // null: the CPU has none
    std::unique_ptr<moe_executor> executor_;
    std::vector<layer_id>         layers_;
};

// Allocates a cache's pools for these layers. `where` names the memory in the log.
status allocate_pools(expert_cache & cache, const std::vector<layer_id> & layers, const pool_slots & slots,
                      cache_policy & policy, const char * where);

} // namespace hobbit
