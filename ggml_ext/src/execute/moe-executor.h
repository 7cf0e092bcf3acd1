// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/expert-matmul.h"
#include "graph/inner-graph.h"
#include "model/expert-index.h"
#include "offload/cpu-share.h"
#include "plan/batch-info.h"
#include "plan/layer-step.h"
#include "plan/sequence-thresholds.h"
#include "predict/prefetcher.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// What was done for one layer and batch. Valid during the call that hands it out.
struct layer_report {
    const layer_routing &                routing;
    const layer_plan &                   plan;
    const std::vector<batch_info::row> & rows;         // [n_tokens]
    const std::vector<per_tier<bool>> &  was_resident; // [selection], before anything was loaded
    const std::vector<float> &           router_input; // [n_tokens][n_embd], empty where it is not known
    const ggml_tensor *                  output;       // [n_out, n_used, n_tokens]
};

// What the executors of one model share. Its owner changes it between computations only.
struct run_state {
    layer_step          step;
    sequence_thresholds thresholds;
    batch_info          batch; // that is computed

    std::function<void(const layer_report &)> observer = nullptr; // of every layer computed; null: nobody listens
};

// Runs the part of an outer graph that belongs to the experts of a layer: decides what each missing expert is worth
// (Eq. 2), brings the experts into the cache, and multiplies on the compute device what has arrived while the rest is
// on its way. Experts that do not fit into the pools together stream through them.
//
// Thread-safety: none; see expert_cache. An error, but for being aborted, is repeated for ever: no wrong output
// follows.
class moe_executor {
  public:
    // All must outlive the executor; prefetcher and share may be null.
    moe_executor(const expert_index & index, expert_cache & cache, prefetcher * prefetcher, cpu_share * share,
                 run_state & run, stats & stats);

    // The error that is repeated.
    const status & error() const { return error_; }

    // A MUL_MAT_ID is over experts: its src[0]->extra is an expert_tensor; src[3], where present, holds the router's
    // weights, and src[4] of the first ones of a layer the router's input. Every other operation is repeated as it is.
    // `cpu` computes the CPU's share; it may be null where there is none.
    status compute(ggml_cgraph * graph, inner_graph & inner, inner_graph * cpu);

  private:
    // The layer in hand: what is decided once per batch, for all its matmuls.
    struct layer_state {
        const ggml_tensor *          ids          = nullptr; // null: none
        const ggml_tensor *          router_input = nullptr;
        part_set                     done;               // parts computed
        bool                         in_section = false; // of the graph in hand
        bool                         is_ended   = false;
        layer_routing                routing;
        layer_plan                   plan;
        std::vector<batch_info::row> rows;
        std::vector<per_tier<bool>>  was_resident; // see layer_report
        std::vector<float>           input;        // its router_input
    };

    // Matmuls of one layer that can run at once.
    struct stage {
        std::vector<const ggml_tensor *> matmuls;
        part_set                         parts;
    };

    static stage next_stage(ggml_cgraph * graph, int first, int & end);

    status begin_layer(const stage & s, const ggml_tensor * last, inner_graph & inner);
    status check_weights(const ggml_tensor * matmul) const;
    status begin_section(ggml_cgraph * graph, int first, inner_graph & inner);
    status end_section(inner_graph & inner);
    status compute_share(inner_graph & inner);
    bool   is_share_due() const { return share_ && share_->is_due(); }
    bool   is_on_cpu(const planned_use & use, const stage & s) const;
    void   plan();
    void   count(const step_counts & counts);
    void   observe();
    status end_layer(const ggml_tensor * output, inner_graph & inner);

    status run_stage(const stage & s, inner_graph & inner);
    size_t pin(const stage & s, const std::vector<const planned_use *> & uses, size_t n_pinned);
    status begin_rest(const stage & s, const std::vector<const planned_use *> & pinned, inner_graph & inner);
    status run_arrived(const stage & s, std::vector<const planned_use *> & todo, size_t & n_pinned,
                       bool slots_are_short, inner_graph & inner);
    status add_products(const stage & s, const std::vector<const planned_use *> & uses, inner_graph & inner);
    status clear_skipped(const ggml_tensor * tensor, inner_graph & inner);
    status clear_share(const stage & s, inner_graph & inner);
    void   release_held();

    status run(ggml_cgraph * graph, inner_graph & inner);

    const expert_index & index_;
    expert_cache &       cache_;
    prefetcher *         prefetcher_;
    cpu_share *          share_;
    run_state &          run_;
    stats &              stats_;
    const expert_matmuls products_;

    layer_state                      layer_;
    std::vector<const planned_use *> held_;          // pinned until the layer is done, or others need the slots
    inner_graph *                    cpu_ = nullptr; // of the computation in hand
    status                           error_;
};

} // namespace hobbit
