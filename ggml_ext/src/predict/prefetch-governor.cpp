// SPDX-License-Identifier: MIT
#include "predict/prefetch-governor.h"

#include <algorithm>

namespace hobbit {

bool prefetch_governor::pays() const {
    pass sum;
    for (const pass & p : passes_) {
        sum.prefetched += p.prefetched;
        sum.used       += p.used;
        sum.demand     += p.demand;
        sum.wall       += p.wall;
    }
    if (sum.prefetched < min_experts || !(sum.wall > 0.0)) {
        return true;
    }
    const double precision = double(sum.used) / double(sum.prefetched);
    const double idle      = 1.0 - sum.demand / sum.wall;
    return precision + idle > 1.0;
}

void prefetch_governor::end_pass(const pass & p) {
    if (!active()) {
        pause_left_--;
        return;
    }
    passes_.push_back(p);
    if (passes_.size() > window) {
        passes_.pop_front();
        next_pause_ = min_pause; // the trial succeeded
    }
    if (passes_.size() >= min_passes && !pays()) {
        pause_left_ = next_pause_;
        next_pause_ = std::min(2 * next_pause_, max_pause);
        n_pauses_++;
        passes_.clear();
    }
}

} // namespace hobbit
