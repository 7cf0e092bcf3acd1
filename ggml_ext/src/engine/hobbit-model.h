// SPDX-License-Identifier: MIT
#pragma once

#include "backend/ggml-hobbit.h"
#include "base/stats.h"
#include "base/status.h"
#include "base/thread-annotations.h"
#include "cache/expert-cache.h"
#include "engine/settings.h"
#include "execute/hits-ahead.h"
#include "execute/moe-executor.h"
#include "graph/inner-graph.h"
#include "hobbit.h"
#include "io/embedding-reader.h"
#include "io/file-reader.h"
#include "io/loader.h"
#include "model/expert-index.h"
#include "offload/cpu-share.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"
#include "predict/predictor.h"
#include "predict/prefetcher.h"
#include "record/trace.h"

#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace hobbit {

// One device that computes experts: its layers, the pools with their experts, and the executor that runs them.
// hobbit-pools.cpp defines its functions.
//
// Thread-safety: none; see expert_cache.
struct device_engine {
    // The model must outlive it. REQUIRES: the model has its loader, and its cache in host memory where it needs one
    device_engine(hobbit_model & model, ggml_backend_dev_t device);

    uint32_t n_layers() const { return uint32_t(layers_.size()); }

    pool_demand demand() const { return cache_.demand(layers_); }

    // Bytes of the device's memory that computing takes beside the pools, and of these the predictor's.
    uint64_t rows(uint32_t n_batch) const;
    uint64_t predictor_bytes() const { return predictor_ ? predictor_->bytes() : 0; }

    // Gives the CPU a share of the layers. REQUIRES: there is a host cache
    void start_sharing();

    // Fills free slots with experts of its layers, in this order.
    void fill(tier_id tier, const std::vector<expert_id> & most_used);

    // REQUIRES: the pools are allocated. The arguments must outlive the engine; prefetcher may be null.
    void start(prefetcher * prefetcher, run_state & run);

    // slots: of the pools, as planned or allocated.
    hobbit_device_info info(const pool_slots & slots) const;

    hobbit_model &             model_;
    const ggml_backend_dev_t   device_;
    ggml_backend_buffer_type   buffer_type_; // type of the expert tensors that it computes; its device is the backend's
    expert_cache               cache_;
    std::unique_ptr<predictor> predictor_; // gets all layers' routers: prefetch crosses devices; null: no prefetch
    std::unique_ptr<hits_ahead>   ahead_;
    std::unique_ptr<cpu_share>    share_;    // null: the CPU has none
    std::unique_ptr<moe_executor> executor_; // null before start()
    std::vector<layer_id>         layers_;   // ascending
};

} // namespace hobbit

// One context of a model: its name for the batches and sequences that it announces. The model holds the state of the
// batch that it computes, since it computes one at a time.
struct hobbit_context {
    // Numbers of sequences; llama.cpp uses 256 at most.
    static constexpr int32_t MAX_SEQUENCES = 1 << 16;

    hobbit_model * const model;  // holds a reference
    const int32_t        number; // the lowest that no other context of the model has

    // The number of a sequence among those of all contexts.
    int32_t global(int32_t sequence) const { return number * MAX_SEQUENCES + sequence; }
};

// One opened model. It owns the index, the loader, the policy and the counters, of which a model has one each, the
// engines of all devices, and their next-level cache in host memory. Functions of hobbit.h are its methods: files of
// this folder define them, and to all others it is a split_runner.
//
// Thread-safety: all functions may be called from any thread, except place_layers and ~hobbit_model. mutex_ guards what
// changes after place_layers. A context's batch holds the model from hobbit_begin_batch to hobbit_end_batch:
// computations of other threads, and batches of other contexts, wait for its end.
struct hobbit_model final : public hobbit::split_runner {
    // Leaves the model null, without an error, if llama.cpp should load the file as usual.
    static hobbit::status open(const std::string & path, const hobbit_setting * given, size_t n_given,
                               std::unique_ptr<hobbit_model> & model);
    ~hobbit_model();

    // See hobbit.h.
    hobbit::status place_layers(const ggml_backend_dev_t * devices, size_t n_devices, bool can_repeat);
    hobbit::status set_costs(std::vector<float> low, std::vector<float> skip);
    hobbit_info    info() const; // allocates nothing: it cannot fail

    // Calls a function that has no error of its own; what it throws is an error of the next computation.
    template <typename F>
    void guard(F function) noexcept {
        try {
            function();
        } catch (const std::exception & e) {
            hobbit::mutex_lock lock(mutex_);
            keep(e);
        }
    }

    //
    // For the backend
    //

    void                          ref() override { n_references_++; }
    void                          unref() override;
    bool                          owns(const std::string & tensor) const override;
    const hobbit::expert_tensor * find_tensor(const std::string & name) const override {
        return index_.find_tensor(name);
    }
    hobbit::status compute(ggml_cgraph * graph, ggml_backend_dev_t device, hobbit::inner_graph & inner,
                           hobbit::inner_graph * cpu) override;
    hobbit::status look_up(ggml_tensor * lookup) override;

    //
    // Parts that the functions of hobbit.h use
    //

    // Slots of all pools, as planned or allocated.
    struct model_slots {
        std::vector<hobbit::pool_slots> devices; // [engine]
        hobbit::pool_slots              host           = {};
        uint64_t                        snapshot_bytes = 0;
    };

    bool                 end_reads(); // see loader::end
    hobbit::status       open_files();
    void                 build(const std::vector<ggml_backend_dev_t> & devices) REQUIRES(mutex_);
    bool                 memory_is_short(bool in_host) const;
    hobbit::status       check_numbers(const hobbit::rule_numbers & t) const;
    hobbit::status       check_passes(const hobbit::rule_numbers & t) const REQUIRES(mutex_);
    hobbit::rule_options rule() const;
    void                 assign_layers(const std::vector<ggml_backend_dev_t> & of_layers);

    // The engine that computes the block's experts; any engine for a block without experts.
    hobbit::device_engine & engine_of(int64_t block) const;

    // memory: hobbit-pools.cpp
    hobbit::status       check_further_context(uint64_t model_bytes) const REQUIRES(mutex_);
    hobbit::other_memory memory_beside(uint64_t model_bytes) const;
    uint64_t             host_rows(uint32_t n_batch) const;
    hobbit::status       plan_slots(uint64_t model_bytes, uint32_t n_batch, model_slots & slots) const;
    hobbit::status       keep_slots(model_slots slots) REQUIRES(mutex_);
    hobbit::status       prepare(uint64_t model_bytes, uint32_t n_batch) REQUIRES(mutex_);
    hobbit::status       allocate(uint64_t model_bytes, uint32_t n_batch) REQUIRES(mutex_);
    hobbit::status       allocate_host(const hobbit::pool_slots & slots) REQUIRES(mutex_);
    void                 start() REQUIRES(mutex_);
    void                 fill(const std::vector<hobbit::expert_id> & most_used) REQUIRES(mutex_);

    // computing: hobbit-compute.cpp
    template <typename F>
    hobbit::status run(F computation);
    void           keep(const std::exception & e) noexcept REQUIRES(mutex_);
    void           await_others() REQUIRES(mutex_);
    void           release() REQUIRES(mutex_);
    void           start_sequence(int32_t sequence) REQUIRES(mutex_);
    hobbit::status try_changes(const hobbit_setting * changes, size_t n_changes, hobbit::settings & changed) const
        REQUIRES(mutex_);
    void set_reporting() REQUIRES(mutex_);

    std::atomic<uint32_t> n_references_{ 1 };
    const pid_t           opened_by_ = getpid();

    hobbit::settings          settings_;
    std::string               precision_; // in words, see hobbit_info
    hobbit::expert_index      index_{ hobbit::settings::stored_keys() };
    uint64_t                  resident_here_   = 0; // when this process opened the model
    uint64_t                  resident_before_ = 0; // see hobbit.process
    std::atomic<uint64_t>     snapshot_{ 0 };       // see hobbit_set_snapshot_size
    hobbit::stats             stats_;
    hobbit::stats             host_stats_; // counters of host_
    hobbit::posix_file_reader reader_;
    hobbit::precision_costs   costs_;

    const std::unique_ptr<hobbit::batch_passes> passes_ = // null: each batch has one pass
        hobbit::make_passes ? hobbit::make_passes() : nullptr;

    // from place_layers on
    std::atomic<bool>                                   is_placed_{ false };
    std::unique_ptr<hobbit::precision_rule>             rule_;
    std::unique_ptr<hobbit::cache_policy>               policy_;
    std::unique_ptr<hobbit::run_state>                  run_;
    ggml_backend_buffer_type_t                          transfer_memory_ = nullptr;
    std::unique_ptr<hobbit::expert_cache>               host_;          // null: the pools themselves are in host memory
    std::unique_ptr<hobbit::prefetcher>                 prefetcher_;    // null: no prefetch
    std::vector<std::unique_ptr<hobbit::device_engine>> engines_;       // one for each device
    std::vector<uint32_t>                               layer_engines_; // [layer], index of engines_
    bool                                                is_filling_ = false; // the devices' pools
    std::unique_ptr<hobbit::loader>                     loader_; // destroyed first: its threads write into the caches
    std::optional<hobbit::embedding_reader> rows_; // reads rows of the token embedding; empty if it is in memory
    hobbit::trace_writer                    trace_;
    hobbit::layer_observer                  observer_;

    mutable hobbit::mutex mutex_;

    bool prepared_              GUARDED_BY(mutex_) = false; // the pools are allocated
    uint64_t model_bytes_       GUARDED_BY(mutex_) = 0;     // the memory was divided with them
    model_slots slots_          GUARDED_BY(mutex_);         // see hobbit_plan_pools
    bool can_repeat_            GUARDED_BY(mutex_) = true;  // see hobbit_place_layers
    std::set<int32_t> contexts_ GUARDED_BY(mutex_);         // numbers of those that live
    hobbit::status error_       GUARDED_BY(mutex_);         // error of a computation, repeated for ever

    // The context whose batch holds the model, and the thread that announced it; null: none.
    const hobbit_context * holder_             GUARDED_BY(mutex_) = nullptr;
    std::thread::id holder_thread_             GUARDED_BY(mutex_);
    std::optional<hobbit::timeline_span> pass_ GUARDED_BY(mutex_);     // the holder's
    uint64_t n_asked_                          GUARDED_BY(mutex_) = 0; // for the model, by contexts
    uint64_t n_held_                           GUARDED_BY(mutex_) = 0; // times that a context got it
    hobbit::condition                          released_;

    // made in time
    hobbit::status no_memory_ GUARDED_BY(mutex_) =
        hobbit::status::error("no memory is left to compute experts: free some, and open the model again");
};
