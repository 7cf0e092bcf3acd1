// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
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

} // namespace hobbit
