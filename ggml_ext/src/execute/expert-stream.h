// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "doors/row-source.h"
#include "graph/expert-matmul.h"
#include "graph/inner-graph.h"
#include "graph/routing.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <cstddef>
#include <vector>

namespace hobbit {

// Writes zeros to the rows of skipped selections, behind what was added to the graph: they add nothing to their tokens.
status clear_skipped(const ggml_tensor * tensor, const running_layer & layer, inner_graph & inner);

// Computes the matmuls of a layer, stage by stage, from the experts in the cache: pins as many experts as the pools
// hold, requests the missing ones, and computes experts as they arrive. If the pools are too small for a layer, its
// experts stream through them.
//
// Thread-safety: none; see expert_cache.
class expert_stream {
  public:
    // All must outlive the object.
    expert_stream(const expert_index & index, expert_cache & cache, const std::vector<row_source *> & sources,
                  stats & stats) :
        index_(index), cache_(cache), sources_(sources), stats_(stats), products_(index, cache) {}

    // Scratch memory for all matmuls of a layer.
    status reserve(const running_layer & layer, inner_graph & inner) const {
        return products_.reserve(layer.routing, inner);
    }

    // Adds one stage, and runs what cannot wait. Later stages find the stage's experts pinned unless slots are short.
    // REQUIRES: reserve; the stages of a layer in their order.
    status run(const stage & st, const running_layer & layer, const inner_graphs & on);

    // Runs all that was added, and what sources have due. Without `wait` the device may still run its part afterwards.
    status finish(const inner_graphs & on, bool wait);

    // Takes over pins of experts that the device may be reading, and unpins those of earlier layers.
    void replace_running(const std::vector<expert_id> & pinned);

    // Unpins the experts that the device has computed. REQUIRES: no operation is left to launch
    void release(const inner_graph & device);

  private:
    // The rest of a stage.
    struct work {
        const stage &         st;
        const running_layer & layer;
        const inner_graphs &  on;

        std::vector<const planned_use *> todo; // the pinned ones first
        size_t                           n_pinned = 0;
    };

    row_source * due() const;                                 // has rows to compute; null: none
    bool         is_elsewhere(const planned_use & use) const; // a source computes it
    status       compute_due(const inner_graphs & on);

    status run_behind(const running_layer & layer, const inner_graphs & on);
    void   unpin_running();
    work   begin(const stage & st, const running_layer & layer, const inner_graphs & on);
    status run_all(work & w);
    status run_todo(work & w);
    void   pin(work & w);
    status begin_rest(const work & w);
    status run_arrived(work & w, bool slots_are_short);
    status add_products(const work & w, const std::vector<const planned_use *> & uses);

    const expert_index &              index_;
    expert_cache &                    cache_;
    const std::vector<row_source *> & sources_;
    stats &                           stats_;
    const expert_matmuls              products_;

    std::vector<const planned_use *> held_;    // pinned until the layer is computed, or others need the slots
    std::vector<expert_tier>         running_; // experts of layers that the device may still be running
};

} // namespace hobbit
