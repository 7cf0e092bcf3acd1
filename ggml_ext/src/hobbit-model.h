// SPDX-License-Identifier: MIT
#pragma once

#include "cache-policy.h"
#include "cpu-share.h"
#include "expert-cache.h"
#include "expert-index.h"
#include "expert-kinds.h"
#include "file-reader.h"
#include "ggml-backend-impl.h"
#include "hobbit.h"
#include "inner-graph.h"
#include "loader.h"
#include "moe-executor.h"
#include "pool-plan.h"
#include "predictor.h"
#include "prefetcher.h"
#include "row-reader.h"
#include "run-recorder.h"
#include "settings.h"
#include "stats.h"
#include "status.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

// One opened model: the parts of the cache and how they hang together.
//
// Thread-safety: prepare and compute take turns; everything else is constant after open, or atomic.
struct hobbit_model {
  public:
    // model stays null, without an error, where llama.cpp is to load the file as it always does.
    static hobbit::status open(const std::string & path, const hobbit_setting * given, size_t n_given,
                               std::unique_ptr<hobbit_model> & model);

    ~hobbit_model();

    hobbit::status set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                              const ggml_tensor * selection_bias, hobbit_gating gating);
    hobbit::status prepare(uint64_t model_bytes, uint32_t n_batch);
    void begin_batch(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions, const int8_t * outputs);
    void begin_sequence(int32_t sequence);
    hobbit::status set_thresholds(double t1, double t2);
    hobbit::status set_sequence_thresholds(int32_t sequence, double t1, double t2);
    hobbit::status check() const;
    void           set_observer(hobbit_observer observer, void * user_data);

    // Runs a split of an outer graph that has matmuls over experts.
    // `cpu` computes the CPU's share; null where the CPU computes all.
    hobbit::status compute(ggml_cgraph * graph, hobbit::inner_graph & inner, hobbit::inner_graph * cpu);

    // Runs a GET_ROWS over the token embedding. REQUIRES: owns() it.
    hobbit::status look_up(ggml_tensor * lookup);

    // Whether the tensor's data stays on disk.
    bool owns(const std::string & tensor) const;

    const hobbit::expert_index & index() const { return index_; }
    const hobbit::settings &     config() const { return settings_; }
    const hobbit::stats &        counters() const { return stats_; }
    ggml_backend_buffer_type_t   buffer_type() { return &buffer_type_; }
    hobbit_info                  info() const;

    std::atomic<uint32_t> n_references{ 1 };

  private:
    hobbit_model() = default;

    hobbit::status      start();
    bool                memory_is_short() const;
    hobbit::pool_demand demand(const hobbit::expert_cache & cache) const;
    uint64_t            row_bytes(uint32_t n_batch) const;
    uint64_t            staging_bytes() const;
    hobbit::status      plan_memory(uint64_t model_bytes, uint32_t n_batch, hobbit::pool_plan & plan) const;
    hobbit::status      check_thresholds(const hobbit::score_thresholds & t) const;
    hobbit::status      change_thresholds(double t1, double t2, hobbit::settings & changed) const;
    hobbit::status allocate_pools(hobbit::expert_cache & cache, const hobbit::pool_slots & slots, const char * where);
    void           fill_pools();
    hobbit::status start_sharing(const hobbit::pool_slots & host_slots);
    void           start_sequence(int32_t sequence);
    void           set_reporting();
    void           keep_error(const hobbit::status & s);

    hobbit::settings                      settings_;
    hobbit::expert_index                  index_;
    uint64_t                              resident_before_ = 0;
    ggml_backend_dev_t                    device_          = nullptr; // that computes the experts
    ggml_backend_buffer_type              buffer_type_;
    hobbit::stats                         stats_;
    hobbit::stats                         host_stats_; // of host_ alone, where it differs
    hobbit::posix_file_reader             reader_;
    std::optional<hobbit::row_reader>     rows_; // of the token embedding, where it stays on disk
    std::unique_ptr<hobbit::cache_policy> policy_;
    std::unique_ptr<hobbit::expert_cache> host_; // null: cache_ is in host memory itself
    std::unique_ptr<hobbit::expert_cache> cache_;
    std::unique_ptr<hobbit::predictor>    predictor_;  // null: no prefetch
    std::unique_ptr<hobbit::prefetcher>   prefetcher_; // null: no prefetch
    std::optional<hobbit::expert_kinds>   kinds_;      // where there is a share
    std::unique_ptr<hobbit::cpu_share>    share_;      // null: host_ has no experts
    std::unique_ptr<hobbit::moe_executor> executor_;
    std::unique_ptr<hobbit::loader>       loader_; // destroyed first: its threads write into the cache
    hobbit::run_recorder                  recorder_;

    mutable std::mutex mutex_;
    bool               prepared_ = false; // guarded by mutex_
    hobbit::status     error_;            // of a computation, repeated for ever; guarded by mutex_
};
