// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"
#include "plan/precision-rule.h"
#include "predict/predictor.h"
#include "predict/prefetch-governor.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

// Loads predicted experts into their layer's cache before the layer runs, in the precision that their predicted weights
// ask for. It looks ahead up to the first layer with a predicted miss. Predicted experts are protected until their
// layer's router has chosen; reads that have not begun by then are dropped. The experts of the next token's first layer
// are not predicted, since the token is not known yet.
//
// In the second pass over a batch it asks for what the first one chose in all later layers, as far as there is room
// (MoBiLE, III-B), also where n_ahead is 0.
//
// While tokens are generated, a governor pauses it if it does not pay, and it rests while nothing misses. It switches
// itself off, with a warning, where the predictor lacks what it needs of the model.
//
// Thread-safety: none; called by the thread that computes, with the layers of a batch in their order.
class prefetcher {
  public:
    // The cache of a layer's experts, and the predictor on the device that computes the layer; null if n_ahead is 0.
    struct layer_place {
        expert_cache * cache;
        predictor *    ahead;
    };

    using clock = std::function<std::chrono::steady_clock::time_point()>;

    // `places` has one entry per layer. All that they point to, index and stats must outlive the prefetcher. `now` is
    // what passes are timed by. REQUIRES: the pools are allocated, the routers set.
    prefetcher(const expert_index & index, const std::vector<layer_place> & places, uint32_t n_ahead,
               std::unique_ptr<precision_rule> rule, const sequence_thresholds & thresholds, const batch_info & batch,
               stats & stats, clock now = std::chrono::steady_clock::now);

    // False: it neither pauses nor rests.
    void set_trials(bool are_on) { has_trials_ = are_on; }

    // The layer's router has chosen; nothing is decided or loaded for the layer yet.
    void on_routing(const layer_routing & routing);

    // Begins to compute what look_ahead() will ask the predictor for in this layer; see predictor::begin.
    const ggml_tensor * begin(layer_id running, const ggml_tensor * router_input, ggml_backend_t backend);
    void                end(layer_id running, const char * bytes) { places_[running].ahead->end(bytes); }

    // Returns true if look_ahead() may read the router's input in this layer, though begin() has not begun.
    bool may_read(layer_id running) const {
        const bool is_first = !in_pass_ || running <= layer_; // the kind of its pass is not known
        return !declined_ && n_ahead_of(running) > 0 && (is_first || is_on());
    }

    // Predicts and prefetches. router_input belongs to the outer graph; null where it is not known.
    // REQUIRES: on_routing(running); the layer's experts are pinned and requested.
    status look_ahead(const layer_routing & running, const ggml_tensor * router_input, ggml_backend_t backend);

    // The layer has been computed.
    void end_layer(layer_id layer);

  private:
    // Predicted choices of a later layer.
    struct expectation {
        std::set<uint32_t> predicted;
        std::set<uint32_t> prefetched;
    };

    enum class outcome { all_resident, all_requested, no_room };

    static constexpr uint32_t quiet_passes = 2; // passes without a miss or a prefetch before it rests

    void     decline(const std::string & why);
    bool     is_on() const { return !declined_ && (is_prompt_ || !has_trials_ || is_worth_it()); }
    bool     is_worth_it() const { return governor_.active() && n_quiet_ < quiet_passes; }
    uint32_t n_ahead_of(layer_id running) const;
    uint64_t n_missed() const { return stats_.misses[tier_id::high] + stats_.misses[tier_id::low]; }
    void     begin_pass(const layer_routing & routing);
    void     end_pass();
    void     judge(layer_id layer, const std::set<uint32_t> & chosen);
    status   replay(const layer_routing & running, ggml_backend_t backend);
    outcome  prefetch(const layer_routing & prediction);

    const expert_index & index_;
    const uint32_t       n_ahead_;
    stats &              stats_;
    bool                 declined_ = false;

    const std::unique_ptr<precision_rule> rule_; // rule for predicted experts
    const sequence_thresholds &           thresholds_;
    const batch_info &                    batch_;

    std::vector<layer_place>   places_;       // [layer]
    std::set<predictor *>      predictors_;   // predictors of all places
    std::vector<expectation>   expected_;     // [layer]
    repeat_predictor           draft_;        // predicts in the second pass
    std::vector<layer_routing> predictions_;  // scratch of look_ahead
    uint32_t                   n_layers_run_; // the last layers of a model may never run

    const clock       now_;
    prefetch_governor governor_; // while tokens are generated; a prompt uses nearly all that is predicted
    bool              has_trials_ = true;

    // the current pass
    bool                                  in_pass_   = false;
    bool                                  is_prompt_ = false;
    bool                                  is_second_ = false;
    uint32_t                              asked_     = 0; // layers for which the second pass has asked
    layer_id                              layer_;         // the last one whose router has chosen
    prefetch_governor::pass               pass_;
    std::chrono::steady_clock::time_point begun_;
    uint64_t                              stall_before_  = 0; // stats.stall_ns when it began
    uint64_t                              missed_before_ = 0; // n_missed()
    uint32_t                              n_quiet_       = 0; // passes up to it without a miss or a prefetch
};

} // namespace hobbit
