// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <utility>

namespace hobbit {

// A clock for time limits. While the process is stopped (SIGSTOP, Ctrl-Z, a paused container) nothing can ask for the
// time, so of the time between two questions a second counts at most. A waiter must poll at least once a second.
//
// Thread-safety: none.
class awake_clock {
  public:
    using steady     = std::chrono::steady_clock;
    using time_point = steady::time_point;

    explicit awake_clock(std::function<time_point()> source = steady::now) :
        source_(std::move(source)), asked_(source_()), now_(asked_) {}

    time_point now() {
        const time_point current  = source_();
        now_                     += std::min<steady::duration>(current - asked_, std::chrono::seconds(1));
        asked_                    = current;
        return now_;
    }

  private:
    std::function<time_point()> source_;
    time_point                  asked_; // time of the last now(), by the source
    time_point                  now_;
};

} // namespace hobbit
