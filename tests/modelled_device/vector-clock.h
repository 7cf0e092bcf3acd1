// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace modelled {

using clock_time = uint32_t;

// The deeds of each actor that are known: all up to a time of its own. Thread-safety: none.
class vector_clock {
  public:
    clock_time at(int who) const { return size_t(who) < times_.size() ? times_[size_t(who)] : 0; }

    void tick(int who) {
        times_.resize(std::max(times_.size(), size_t(who) + 1));
        times_[size_t(who)]++;
    }

    void join(const vector_clock & other) {
        times_.resize(std::max(times_.size(), other.times_.size()));
        for (size_t i = 0; i < other.times_.size(); i++) {
            times_[i] = std::max(times_[i], other.times_[i]);
        }
    }

  private:
    std::vector<clock_time> times_;
};

} // namespace modelled
