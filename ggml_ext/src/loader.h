// SPDX-License-Identifier: MIT
#pragma once

#include "expert-index.h"
#include "file-reader.h"
#include "stats.h"
#include "status.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace hobbit {

// Which parts of one expert in one slot were asked for and which have arrived (part_bit masks; arrived is a subset).
// Guarded by the mutex of the loader that serves it; must live until it is settled or the loader ends.
struct load_state {
    uint32_t requested = 0;
    uint32_t arrived   = 0;
};

enum class load_urgency { demand, prefetch };

// Reads experts' parts from their files into slots, in threads of its own. Demands take all threads. A prefetch begins
// only when no demand is queued or in flight, and no other prefetch: a demand waits for one read at most. The first
// error is kept: it is the answer to every wait from then on, what was queued is dropped and nothing more is read.
//
// Thread-safety: all methods may be called from any thread. The destructor finishes the reads in flight, drops the
// others and joins the threads.
class loader {
  public:
    // reader and stats must outlive the loader.
    loader(file_reader & reader, stats & stats, uint32_t n_threads);
    ~loader();

    loader(const loader &)             = delete;
    loader & operator=(const loader &) = delete;

    // Asks for one part, once: asking again only turns a prefetch that has not arrived into a demand. dst is a multiple
    // of file_reader::alignment and has room for aligned_span(location); the part then begins at data_offset(location)
    // in it. After an error nothing is asked for.
    void submit(load_state & state, uint32_t part, const part_location & location, char * dst, load_urgency urgency);

    // Drops the prefetches that have not begun: these parts then count as not asked for.
    void cancel(load_state & state);

    // Blocks until all of `parts` have arrived. REQUIRES: they were asked for, and not cancelled since.
    status wait(const load_state & state, uint32_t parts);

    // Whether, or until, nothing that was asked for is on the way any more: it has arrived, or will never.
    bool settled(const load_state & state) const;
    void settle(const load_state & state);

    // The first error, if there was one.
    status error() const;

    bool     arrived(const load_state & state, uint32_t parts) const;
    uint32_t requested(const load_state & state) const;

    // Forgets the parts that have arrived. REQUIRES: none is on the way.
    void reset(load_state & state);

    static size_t data_offset(const part_location & location) { return location.offset % file_reader::alignment; }

    static size_t aligned_span(const part_location & location) {
        const size_t a = file_reader::alignment;
        return (data_offset(location) + location.size + a - 1) / a * a;
    }

  private:
    struct request {
        load_state *  state;
        uint32_t      part;
        part_location location;
        char *        dst;
    };

    void run();

    // REQUIRES: mutex_ held
    bool next_request(request & next);
    void promote(const load_state & state, uint32_t part);
    void finish(const request & done, const status & result);
    void fail(const status & error);
    void change_demands(ptrdiff_t change); // of n_demands_; counts the time until now

    file_reader & reader_;
    stats &       stats_;

    mutable std::mutex      mutex_;
    std::condition_variable work_;     // a request may begin, or stop_
    std::condition_variable progress_; // a part arrived or never will, or error_ was set
    // guarded by mutex_
    std::deque<request>                   demand_;
    std::deque<request>                   prefetch_;
    std::optional<request>                prefetching_;   // in flight, until it arrives or becomes a demand
    size_t                                n_demands_ = 0; // queued or in flight
    std::chrono::steady_clock::time_point counted_until_; // disk_demand_ns, while there are any
    status                                error_;
    bool                                  stop_ = false;

    std::vector<std::thread> threads_; // constant after construction
};

} // namespace hobbit
