// SPDX-License-Identifier: MIT
#include "predict/prefetch-governor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hobbit {

// Standard errors between the mean and no difference. A gain of 10 % seldom looks like a loss then, in noise of a fifth
// that lasts from pair to pair, and a loss of 10 % is found after some 15 pairs.
static constexpr double CLEAR_GAIN = 2.5;
static constexpr double CLEAR_LOSS = 2.0;

prefetch_governor::verdict prefetch_governor::judge() const {
    const bool is_last = n_pairs_ == max_pairs;
    if (prefetched_ < min_experts) {
        return is_last ? verdict::gain : verdict::open;
    }
    if (n_pairs_ >= stall_pairs && stall_ < min_stall * wall_) {
        return verdict::loss;
    }
    if (ratios_.size() < min_pairs) {
        return is_last ? verdict::gain : verdict::open;
    }
    return compare_times();
}

prefetch_governor::verdict prefetch_governor::compare_times() const {
    const auto   n     = double(ratios_.size());
    const double mean  = std::accumulate(ratios_.begin(), ratios_.end(), 0.0) / n;
    const double sum   = std::accumulate(ratios_.begin(), ratios_.end(), 0.0,
                                         [&](double s, double r) { return s + (r - mean) * (r - mean); });
    const double error = std::sqrt(sum / (n - 1) / n);
    if (mean < -CLEAR_GAIN * error) {
        return verdict::gain;
    }
    if (mean > CLEAR_LOSS * error) {
        return verdict::loss;
    }
    if (n_pairs_ < max_pairs) {
        return verdict::open;
    }
    return mean < 0 ? verdict::gain : verdict::loss;
}

void prefetch_governor::end_trial(bool is_gain) {
    is_on_       = is_gain;
    left_        = is_gain ? hold : next_pause_;
    next_pause_  = is_gain ? min_pause : std::min(2 * next_pause_, max_pause);
    n_pauses_   += !is_gain;
    n_pairs_     = 0;
    prefetched_  = 0;
    wall_        = 0;
    stall_       = 0;
    ratios_.clear();
}

void prefetch_governor::end_pass(const pass & p) {
    if (!is_trial()) {
        left_--;
        return;
    }
    is_first_of_pair_ = !is_first_of_pair_;
    if (!is_first_of_pair_) {
        first_ = p;
        return;
    }
    n_pairs_++;
    prefetched_ += first_.prefetched;
    wall_       += p.wall;
    stall_      += p.stall;
    if (first_.wall > 0 && p.wall > 0) {
        ratios_.push_back(std::log(first_.wall / p.wall));
    }
    const verdict v = judge();
    if (v != verdict::open) {
        end_trial(v == verdict::gain);
    }
}

} // namespace hobbit
