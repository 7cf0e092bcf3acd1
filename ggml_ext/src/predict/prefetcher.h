// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"
#include "plan/precision-rule.h"
#include "plan/sequence-thresholds.h"
#include "predict/predictor.h"
#include "predict/prefetch-governor.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

// Brings experts into their layer's cache before the layer runs: those that the predictor names for the layers ahead,
// in the precision that their predicted weights ask for, up to the first layer that has something missing. Residuals
// come after all low versions of their layer. Predicted experts are protected until their layer's router has chosen;
// what was not begun by then is dropped. The experts of the next token's first layer are not predicted: the token is
// not known yet.
//
// Declines, with a warning, where the routers or what they are applied to are not known.
//
// Thread-safety: none; called by the thread that computes, with the layers of a batch in their order.
class prefetcher {
  public:
    // Where a layer is computed: its experts' cache, and what looks ahead from it, with all layers' routers.
    struct layer_place {
        expert_cache * cache;
        predictor *    routers;
    };

    // `places` are of each layer. All that they point to, index and stats must outlive the prefetcher.
    // REQUIRES: the pools are allocated, the routers set.
    prefetcher(const expert_index & index, const std::vector<layer_place> & places, uint32_t n_ahead,
               std::unique_ptr<precision_rule> rule, const sequence_thresholds & thresholds, const batch_info & batch,
               stats & stats);

    // What the layer's router has chosen, before anything is decided or loaded for it.
    void on_routing(const layer_routing & routing);

    // Predicts and prefetches. REQUIRES: on_routing of this layer; its experts are pinned and asked for.
    // router_input belongs to the outer graph; null where it is not known.
    status look_ahead(layer_id layer, const ggml_tensor * router_input, ggml_backend_t backend);

    // The layer has been computed.
    void end_layer(layer_id layer);

  private:
    using clock = std::chrono::steady_clock;

    // Of one layer to come.
    struct expectation {
        std::set<uint32_t> predicted;
        std::set<uint32_t> prefetched;
    };

    void                decline(const std::string & why);
    prefetch_governor & governor() { return governors_[is_prompt_]; }
    void                begin_pass(const layer_routing & routing);
    void                end_pass();
    void                judge(layer_id layer, const std::set<uint32_t> & chosen);
    bool                bring(const layer_routing & prediction);
    bool                bring_term(const planned_use & use, size_t number, part_set parts);

    const expert_index & index_;
    const uint32_t       n_ahead_;
    stats &              stats_;
    bool                 declined_ = false;

    const std::unique_ptr<precision_rule> rule_; // of what is predicted
    const sequence_thresholds &           thresholds_;
    const batch_info &                    batch_;
    const bool                            has_low_;

    std::vector<layer_place>   places_;       // [layer]
    std::vector<expectation>   expected_;     // [layer]
    std::vector<layer_routing> predictions_;  // scratch of look_ahead
    uint32_t                   n_layers_run_; // the last layers of a model may never run

    // What pays when a token follows the other need not when a prompt is read.
    std::array<prefetch_governor, 2> governors_;
    bool                             is_prompt_ = false;

    // the pass in hand
    bool                    in_pass_ = false;
    layer_id                layer_;      // the last one whose router has chosen
    int64_t                 n_used_ = 0; // by a token in it
    prefetch_governor::pass pass_;
    clock::time_point       begun_;
    uint64_t                demand_before_ = 0; // stats_.disk_demand_ns
};

} // namespace hobbit
