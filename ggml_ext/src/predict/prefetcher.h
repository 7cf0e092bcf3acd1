// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "doors/row-source.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"
#include "plan/precision-rule.h"
#include "predict/predictor.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

// Decides by measured time whether prefetch pays while tokens are generated. A trial runs passes in pairs, one with
// prefetch and one without, and compares their times. It ends as soon as the mean ratio shows a gain or a loss, and
// otherwise after max_pairs. A loss needs a little less evidence than a gain, since most short runs see no more than
// one trial. A trial is also lost if the passes without prefetch hardly wait for the disk: prefetch saves no more than
// that wait. Prefetch then stays on for `hold` passes, or pauses; the pause doubles after each trial that prefetch
// loses. A new trial follows. Pure: no clock.
class prefetch_governor {
  public:
    // One pass of a batch through the layers.
    struct pass {
        uint64_t prefetched = 0; // experts
        double   wall       = 0; // in any unit; passes of 0 are not compared
        double   stall      = 0; // part of it that waited for the disk
    };

    static constexpr uint32_t warm_up     = 4;    // passes with prefetch before the first trial
    static constexpr double   min_stall   = 0.03; // share of the time without prefetch that it must be able to save
    static constexpr uint32_t stall_pairs = 4;    // pairs before this share is judged
    static constexpr uint32_t min_pairs   = 8;    // pairs before times are compared
    static constexpr uint32_t max_pairs   = 48;
    static constexpr uint64_t min_experts = 32; // prefetches of a trial; with fewer prefetch cannot lose and stays on
    static constexpr uint32_t hold        = 1024;
    static constexpr uint32_t min_pause   = 256;
    static constexpr uint32_t max_pause   = 4096;

    // Returns true if the next pass prefetches.
    bool active() const { return is_trial() ? is_first_of_pair_ : is_on_; }

    // The verdict of the last trial; true before the first.
    bool     is_on() const { return is_on_; }
    uint64_t n_pauses() const { return n_pauses_; }

    void end_pass(const pass & p);

  private:
    enum class verdict { open, gain, loss };

    bool    is_trial() const { return left_ == 0; }
    verdict judge() const;
    verdict compare_times() const;
    void    end_trial(bool is_gain);

    bool     is_on_      = true;
    uint32_t left_       = warm_up; // passes until the next trial; 0: a trial runs
    uint32_t next_pause_ = min_pause;
    uint64_t n_pauses_   = 0;

    // the trial
    bool                is_first_of_pair_ = true;
    pass                first_; // first pass of the pair, with prefetch
    uint32_t            n_pairs_    = 0;
    uint64_t            prefetched_ = 0;
    double              wall_       = 0; // seconds of the passes without prefetch
    double              stall_      = 0; // seconds that these waited for reads
    std::vector<double> ratios_;         // logarithms of the time with prefetch by that without
};

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
class prefetcher final : public row_source {
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

    // Begins to compute what look_ahead() will ask the predictor for in this layer; see predictor::begin. If it does
    // not, look_ahead() may read the router's input, which must then not be overwritten.
    void before_routing(next_layer & next) override;
    void after_routing(const next_layer & next, const char * bytes) override;

    void on_routing(const layer_routing & routing) override;

    // Predicts and prefetches. REQUIRES: on_routing
    status look_ahead(const running_layer & running, ggml_backend_t backend) override;

    void end_layer(inner_graph & device) override;

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
