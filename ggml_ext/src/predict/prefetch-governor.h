// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace hobbit {

// Decides whether prefetch pays. q is the share of prefetched experts that are used, u the share of time in which no
// layer waits for the disk. A correct prefetch gains if the disk would have been idle (q u), and a wrong one costs if
// the disk would have been busy ((1 - q) (1 - u)), so prefetch pays while q + u > 1. Otherwise it pauses for a number
// of passes and is tried again; the pause doubles after each failed trial. Pure: no clock.
class prefetch_governor {
  public:
    // One pass of a batch through the layers.
    struct pass {
        uint64_t prefetched = 0; // experts
        uint64_t used       = 0; // of the prefetched
        double   demand     = 0; // time with a demanded read or copy in flight, in the unit of `wall`
        double   wall       = 0;
    };

    static constexpr size_t   window      = 64; // passes that are judged together
    static constexpr size_t   min_passes  = 16; // before the first decision
    static constexpr uint64_t min_experts = 32; // prefetched in the window; prefetch goes on with fewer
    static constexpr uint32_t min_pause   = 256;
    static constexpr uint32_t max_pause   = 4096;

    bool     active() const { return pause_left_ == 0; }
    uint64_t n_pauses() const { return n_pauses_; }

    void end_pass(const pass & p);

  private:
    bool pays() const;

    std::deque<pass> passes_; // at most window
    uint32_t         pause_left_ = 0;
    uint32_t         next_pause_ = min_pause;
    uint64_t         n_pauses_   = 0;
};

} // namespace hobbit
