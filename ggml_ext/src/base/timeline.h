// SPDX-License-Identifier: MIT
#pragma once

#include "base/files.h"
#include "base/status.h"
#include "base/thread-annotations.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>

namespace hobbit {

// Writes which thread did what and when, in Chrome's trace event format, which Perfetto opens too.
//
// Thread-safety: open and close exclude each other; all else may be called from any thread. The events of spans that
// end after close are dropped.
class timeline {
  public:
    using clock = std::chrono::steady_clock;

    // Name and key have static storage.
    struct event {
        const char *      name;
        clock::time_point begin;
        clock::time_point end;
        const char *      key; // names its number; null: it has none
        int64_t           value;
    };

    ~timeline() { close(); }

    // Replaces an older timeline at this path.
    status open(const std::string & path) EXCLUDES(mutex_);

    bool is_open() const { return is_open_.load(std::memory_order_relaxed); }

    // Completes the file, or returns the first error. A no-op if not open.
    status close() EXCLUDES(mutex_);

    // An event of the calling thread.
    void add(const event & e) EXCLUDES(mutex_);

    // The name of the calling thread in all timelines; a thread without one computes.
    static void name_thread(const char * name);

  private:
    mutex                  mutex_;
    std::atomic<bool>      is_open_{ false };
    text_file file_        GUARDED_BY(mutex_);
    std::set<int> threads_ GUARDED_BY(mutex_); // threads that have an event
};

// Adds the time of its own life to a timeline. Costs one load of an atomic where the timeline is not open.
class timeline_span {
  public:
    timeline_span(timeline & to, const char * name, const char * key = nullptr, int64_t value = 0) :
        to_(to.is_open() ? &to : nullptr), event_{ name, {}, {}, key, value } {
        if (to_) {
            event_.begin = timeline::clock::now();
        }
    }

    ~timeline_span() {
        if (to_) {
            event_.end = timeline::clock::now();
            to_->add(event_);
        }
    }

    timeline_span(const timeline_span &)             = delete;
    timeline_span & operator=(const timeline_span &) = delete;

    void note(const char * key, int64_t value) {
        event_.key   = key;
        event_.value = value;
    }

  private:
    timeline *      to_;
    timeline::event event_;
};

} // namespace hobbit
