// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace hobbit {

// Decides whether prefetch pays. Of what was prefetched a share q is used, and for a share u of the time no layer waits
// for the disk. A right prefetch gains where the disk would have been idle (q u), a wrong one costs where it would not
// ((1 - q) (1 - u)): it pays while q + u > 1. Where it does not, it pauses for a number of passes through the layers
// and is tried again; pauses grow while trials fail. Pure: no clock.
class prefetch_governor {
  public:
    // One pass of a batch through the layers.
    struct pass {
        uint64_t prefetched = 0; // experts
        uint64_t used       = 0; // of those
        double   demand     = 0; // time with a demanded read or copy under way, in the unit of `wall`
        double   wall       = 0;
    };

    static constexpr size_t   window      = 64; // passes that are judged together
    static constexpr size_t   min_passes  = 16; // before there is a verdict,
    static constexpr uint64_t min_experts = 32; // and experts prefetched in them: fewer change nothing either way
    static constexpr uint32_t min_pause   = 256;
    static constexpr uint32_t max_pause   = 4096;

    bool     active() const { return pause_left_ == 0; }
    uint64_t n_pauses() const { return n_pauses_; }

    void end_pass(const pass & p);

  private:
    bool pays() const;

    std::deque<pass> passes_; // no more than window
    uint32_t         pause_left_ = 0;
    uint32_t         next_pause_ = min_pause;
    uint64_t         n_pauses_   = 0;
};

} // namespace hobbit
