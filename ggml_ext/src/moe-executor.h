// SPDX-License-Identifier: MIT
#pragma once

#include "expert-cache.h"
#include "expert-index.h"
#include "inner-graph.h"
#include "scorer.h"
#include "stats.h"
#include "status.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Runs the part of an outer graph that belongs to the experts of a layer: decides what each missing expert is worth
// (Eq. 2), brings the experts into the cache, and multiplies on the compute device what has arrived while the rest is
// on its way. Experts that do not fit into the pools together are computed in waves.
//
// Thread-safety: none; see expert_cache. An error, but for being aborted, is repeated for ever: no wrong output
// follows.
class moe_executor {
  public:
    // All must outlive the executor.
    moe_executor(const expert_index & index, expert_cache & cache, const score_thresholds & thresholds, stats & stats);

    // A MUL_MAT_ID is over experts: its src[0]->extra is an expert_tensor, its src[3], where present, holds the
    // router's weights. Every other operation is repeated as it is.
    status compute(ggml_cgraph * graph, inner_graph & inner);

  private:
    // An expert of the layer in hand and the (token, rank) pairs that selected it, numbered token * n_used + rank.
    struct expert_use {
        expert_id            id;
        uint32_t             tier;
        std::vector<int32_t> selections;
    };

    // What is decided once per layer and batch, for all its matmuls.
    struct layer_plan {
        const ggml_tensor *     ids = nullptr;
        uint32_t                layer;
        int64_t                 n_used;
        int64_t                 n_tokens;
        uint32_t                done; // parts computed
        std::vector<expert_use> uses;
        std::vector<int32_t>    skipped; // selections
    };

    // Matmuls of one layer that can run at once.
    struct stage {
        std::vector<const ggml_tensor *> matmuls;
        uint32_t                         parts = 0;
    };

    static stage next_stage(ggml_cgraph * graph, int first, int & end);
    status       plan_layer(const stage & s, inner_graph & inner);
    status read_selection(const ggml_tensor * matmul, std::vector<int32_t> & ids, std::vector<float> & weights) const;
    void   choose_tiers(const std::vector<int32_t> & ids, const std::vector<precision> & worth);

    status run_stage(const stage & s, inner_graph & inner);
    status run_wave(const stage & s, const std::vector<const expert_use *> & wave, inner_graph & inner);
    status add_products(const stage & s, const expert_use & use, inner_graph & inner);
    status clear_skipped(const ggml_tensor * tensor, inner_graph & inner);
    void   release_held();

    status run(ggml_cgraph * graph, inner_graph & inner);
    status flush(inner_graph & inner);
    bool   reserve(const stage & s, inner_graph & inner) const;

    const expert_index &   index_;
    expert_cache &         cache_;
    const score_thresholds thresholds_;
    stats &                stats_;

    layer_plan                      plan_;
    std::vector<const expert_use *> held_; // pinned until the layer is done
    status                          error_;
};

} // namespace hobbit
