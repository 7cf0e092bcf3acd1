// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "doors/batch-passes.h"
#include "doors/layer-hooks.h"
#include "doors/row-source.h"
#include "execute/expert-stream.h"
#include "graph/inner-graph.h"
#include "graph/routing.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace hobbit {

// A report of the work for one layer and batch. Valid during the call that passes it.
struct layer_report {
    const layer_routing &                routing;
    const layer_plan &                   plan;
    const std::vector<batch_info::row> & rows;         // [n_tokens]
    const std::vector<per_tier<bool>> &  was_resident; // [selection], before anything was loaded
    const std::vector<float> &           router_input; // [n_tokens][n_embd]; empty if unknown
    const ggml_tensor *                  output;       // [n_out, n_used, n_tokens]
};

// The state that the executors of one model share. Its owner changes it between computations only.
struct run_state {
    layer_step          step;
    sequence_thresholds thresholds;
    batch_info          batch; // the current one

    std::function<void(const layer_report &)> observer = nullptr; // hears of each layer and batch once; may be null
    batch_passes *                            passes   = nullptr; // over the current batch; null: it has one pass
};

// Adds a pass that is kept.
void count_selections(const step_counts & counts, stats & stats);

// Computes the part of an outer graph that belongs to the experts of a layer. It plans the layer's uses (layer_step),
// requests the missing experts, and multiplies what is resident while the rest arrives (expert_stream).
//
// Thread-safety: none; see expert_cache. Every later call returns the first error, except an abort: no wrong output
// follows.
class moe_executor {
  public:
    // All must outlive the executor. Null sources are left out.
    moe_executor(const expert_index & index, expert_cache & cache, std::vector<row_source *> sources, run_state & run,
                 stats & stats);

    // Calls these too. REQUIRES: before compute
    void add(std::vector<std::unique_ptr<layer_hooks>> hooks) { hooks_ = std::move(hooks); }

    // Every MUL_MAT_ID must be over experts: its src[0]->extra is an expert_tensor. Its src[3] may hold the router's
    // weights, and src[4] of a layer's first matmuls the router's input. Other operations are repeated as they are.
    // `cpu` is for sources that compute there; it may be null if there is none.
    status compute(ggml_cgraph * graph, inner_graph & inner, inner_graph * cpu);

    // Waits until the device has computed everything. The device's graph of the last call must live until then.
    void wait();

  private:
    struct layer_state : running_layer {
        const ggml_tensor *          ids = nullptr;      // the router's choice; null: no layer runs
        layer_section                section;            // the layer's nodes of the current graph, once it gets there
        bool                         in_section = false; // the section runs
        bool                         is_ended   = false;
        std::vector<batch_info::row> rows;
        std::vector<per_tier<bool>>  was_resident; // see layer_report
        std::vector<float>           input;        // its router_input
        host_copy                    matmul_input; // input of the first matmul, for sources
    };

    bool begins_layer(ggml_cgraph * graph) const;
    bool is_done_elsewhere() const;
    bool any_source(bool (row_source::*is_so)() const) const;

    // Calls one function of all sources.
    template <typename... Params, typename... Args>
    void each_source(void (row_source::*call)(Params...), Args &&... args) {
        for (row_source * each : sources_) {
            (each->*call)(args...);
        }
    }

    status       read_layer(inner_graph & inner);
    void         judge_ahead(inner_graph & inner);
    status       run(ggml_cgraph * graph, const inner_graphs & on);
    status       begin_layer(ggml_cgraph * graph, int first, const stage & st, const ggml_tensor * last,
                             const inner_graphs & on);
    routed_layer routed(ggml_cgraph * graph, int first, const inner_graphs & on) const;
    status       begin_section(ggml_cgraph * graph, int first, const inner_graphs & on);
    status       end_layer(const ggml_tensor * output, const inner_graphs & on);
    status       check_weights(const ggml_tensor * matmul) const;
    void         plan();
    void         count(const step_counts & counts);
    void         observe();
    bool         is_second() const { return run_.batch.pass() == batch_pass::second; }

    const expert_index & index_;
    expert_cache &       cache_;
    run_state &          run_;
    stats &              stats_;

    const std::vector<row_source *> sources_;

    expert_stream stream_;
    layer_state   layer_;
    inner_graph * running_ = nullptr; // the device may still be running the last graph; null: it is not

    std::vector<std::unique_ptr<layer_hooks>> hooks_;

    status error_;
};

} // namespace hobbit
