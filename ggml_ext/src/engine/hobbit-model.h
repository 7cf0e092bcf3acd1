// SPDX-License-Identifier: MIT
#pragma once

#include "backend/split-runner.h"
#include "base/stats.h"
#include "base/status.h"
#include "engine/device-engines.h"
#include "engine/settings.h"
#include "ggml-backend-impl.h"
#include "graph/inner-graph.h"
#include "hobbit.h"
#include "io/embedding-reader.h"
#include "io/file-reader.h"
#include "io/loader.h"
#include "model/expert-index.h"
#include "policy/cache-policy.h"
#include "record/run-recorder.h"
#include "record/use-history.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

// One opened model. It owns the index, the loader, the policy and the counters, of which a model has one each, and the
// engines of all devices.
//
// Thread-safety: prepare and compute take turns; everything else is constant after open and place_layers, or atomic.
// An exception, which is memory that ran out, ends in an error of the next computation.
struct hobbit_model final : public hobbit::split_runner {
  public:
    // Leaves the model null, without an error, if llama.cpp should load the file as usual.
    static hobbit::status open(const std::string & path, const hobbit_setting * given, size_t n_given,
                               std::unique_ptr<hobbit_model> & model);

    // See hobbit_resolve_settings.
    static hobbit::status resolve(const char * path, const hobbit_setting * given, size_t n_given,
                                  hobbit_resolved_setting * rows, size_t n_rows);

    ~hobbit_model();

    // See hobbit_place_layers.
    hobbit::status place_layers(const ggml_backend_dev_t * devices, size_t n_devices);

    // See hobbit_buffer_type.
    ggml_backend_buffer_type_t buffer_type(int32_t block) { return places_->of_block(block).buffer_type(); }

    hobbit::status set_router(uint32_t block, const ggml_tensor * weight, const ggml_tensor * bias,
                              const ggml_tensor * selection_bias, hobbit_gating gating);
    hobbit::status plan(uint64_t model_bytes, uint32_t n_batch, hobbit_pool_plan & plan);
    hobbit::status prepare(uint64_t model_bytes, uint32_t n_batch);
    void           end_context();
    void begin_batch(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions, const int8_t * outputs,
                     bool can_repeat);
    bool is_draft() const;
    bool repeats_batch(const float * logits, uint32_t n_vocab);
    hobbit::status refuse_confidence();
    void           begin_sequence(int32_t sequence);
    hobbit::status set_prediction(hobbit::given_routing given);
    hobbit::status change_settings(const hobbit_setting * changes, size_t n_changes);
    hobbit::status change_settings(int32_t sequence, const hobbit_setting * changes, size_t n_changes);

    // See hobbit_sequence_precision.
    hobbit_precision precision(int32_t sequence) const;

    // See hobbit_get_settings.
    void describe_settings(hobbit_resolved_setting * rows, size_t n_rows) const;

    hobbit::status set_costs(std::vector<float> low, std::vector<float> skip);
    hobbit::status check() const;
    void           set_observer(hobbit_observer observer, void * user_data);

    // See hobbit_oldest_read.
    double oldest_read() const;

    void                          ref() override;
    void                          unref() override;
    bool                          owns(const std::string & tensor) const override;
    const hobbit::expert_tensor * find_tensor(const std::string & name) const override {
        return index_.find_tensor(name);
    }
    hobbit::status compute(ggml_cgraph * graph, ggml_backend_dev_t device, hobbit::inner_graph & inner,
                           hobbit::inner_graph * cpu) override;
    hobbit::status look_up(ggml_tensor * lookup) override;

    // Calls a function that has no error of its own; that memory ran out is an error of the model.
    template <typename F>
    void guard(F function) noexcept {
        try {
            function();
        } catch (const std::exception &) {
            std::lock_guard<std::mutex> lock(mutex_);
            keep_no_memory();
        }
    }

    const hobbit::expert_index & index() const { return index_; }
    const hobbit::settings &     config() const { return settings_; }
    const hobbit::stats &        counters() const { return stats_; }
    hobbit_info                  info() const;

    // The i-th device; false if there are fewer.
    bool device_info(size_t i, hobbit_device_info & info) const;

    // See hobbit_get_latency.
    bool latency(size_t device, size_t i, hobbit_latency & found) const;

  private:
    hobbit_model() = default;

    std::atomic<uint32_t> n_references_{ 1 };
    const pid_t           opened_by_ = getpid();

    bool                 end_reads(); // see loader::end
    hobbit::status       open_files();
    void                 build(const std::vector<ggml_backend_dev_t> & devices);
    hobbit::status       check_further_context(uint64_t model_bytes) const;
    bool                 memory_is_short(bool in_host) const;
    uint64_t             staging_bytes() const;
    hobbit::other_memory memory_beside(uint64_t model_bytes) const;
    hobbit::status       check_thresholds(const hobbit::score_thresholds & t) const;
    hobbit::status       check_confidence(const hobbit::score_thresholds & t) const;
    hobbit::status try_changes(const hobbit_setting * changes, size_t n_changes, hobbit::settings & changed) const;
    hobbit::rule_options rule() const;
    void                 start_sequence(int32_t sequence);
    void                 set_reporting();
    void                 keep_no_memory();

    template <typename F>
    hobbit::status run(F computation);

    hobbit::settings                        settings_;
    hobbit::expert_index                    index_{ hobbit::settings::stored_keys() };
    uint64_t                                resident_before_ = 0;
    hobbit::stats                           stats_;
    hobbit::posix_file_reader               reader_;
    hobbit::precision_costs                 costs_;
    hobbit::use_history                     history_{ index_ };
    std::unique_ptr<hobbit::precision_rule> rule_;
    std::unique_ptr<hobbit::cache_policy>   policy_;
    std::unique_ptr<hobbit::run_state>      run_;
    std::unique_ptr<hobbit::device_engines> places_; // null until place_layers, as are rule, policy, run and loader
    std::unique_ptr<hobbit::loader>         loader_; // destroyed first: its threads write into the caches
    std::optional<hobbit::embedding_reader> rows_;   // of the token embedding; none if it is in memory
    hobbit::run_recorder                    recorder_;

    mutable std::mutex mutex_;
    bool               prepared_    = false; // guarded by mutex_
    uint64_t           model_bytes_ = 0;     // that the memory was divided with; guarded by mutex_
    uint32_t           n_contexts_  = 0;     // that live; guarded by mutex_
    bool               can_repeat_  = true;  // see hobbit_refuse_confidence; guarded by mutex_
    hobbit::status     error_;               // of a computation, repeated for ever; guarded by mutex_

    // made in time; guarded by mutex_
    hobbit::status no_memory_ = hobbit::status::error("no memory is left to compute experts: free some, and open the "
                                                      "model again");
};
