// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "base/system-memory.h"
#include "base/thread-annotations.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "io/chunk-queue.h"
#include "io/file-reader.h"
#include "model/expert.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <thread>
#include <vector>

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

// Reads parts of experts from their files into slots, in chunks, so that several loader threads share a part. One more
// thread per device copies parts from slots in host memory to the device's slots. Demands on the disk may use all
// threads, prefetches all but one, so that a demand begins at once. The first error is kept: every later wait returns
// it, queued chunks are dropped and nothing more is read. A read that does not return in time is such an error: waits
// end, though the disk may still write into the slot.
//
// Thread-safety: all methods may be called from any thread. The destructor finishes the reads in flight, drops the
// others and joins the threads; see end().
class loader {
  public:
    // reader and stats must outlive the loader. It copies to those of `devices` that have memory of their own.
    // `staging` is the type of the host memory for rows that are not read in place. `patience` is the time in which a
    // read must return, by `clock`.
    loader(file_reader & reader, stats & stats, uint32_t n_threads,
           const std::vector<ggml_backend_dev_t> & devices = {},
           ggml_backend_buffer_type_t              staging = ggml_backend_cpu_buffer_type(),
           std::chrono::milliseconds patience = std::chrono::minutes(1), awake_clock clock = awake_clock());
    ~loader();

    // The most bytes of one read, unless a single row group is larger. Larger or more simultaneous reads were not
    // faster. A copy has at least as many, or what the link moves in 50 microseconds.
    static constexpr size_t chunk_size = 512 * 1024;

    // Bytes of staging memory for this many threads.
    static size_t staging_size(uint32_t n_threads) { return GGML_PAD(n_threads * chunk_size, HUGE_PAGE); }

    // Requests one part. A repeated one only turns a prefetch under way into a demand. After an error all are ignored.
    void submit(load_state & state, part_id part, const part_location & location, const part_target & target,
                load_urgency urgency);

    // Requests a copy of a part that `from` has in host memory at `source`. If the part is still being read, the copy
    // follows when it arrives; if it never does, the copy counts as not requested. REQUIRES: the part is requested in
    // `from`, which is neither reset nor moved until the copy has arrived; target has a buffer of one of the devices.
    void transfer(load_state & state, part_id part, const load_state & from, const char * source,
                  const part_location & location, const part_target & target, load_urgency urgency);

    // Drops prefetches of parts that have not begun; these then count as not requested.
    void cancel(load_state & state);

    // Drops all prefetches, also those that have begun, and blocks until nothing is in flight.
    void abandon(load_state & state);

    // Blocks until all of `parts` have arrived. REQUIRES: they are requested, and not cancelled since.
    status wait(const load_state & state, part_set parts);

    // Returns true if nothing is in flight: each requested part has arrived or never will. settle() blocks until then,
    // but not much longer than a second, and says whether it is so; true also where a read hangs.
    bool settled(const load_state & state) const;
    bool settle(const load_state & state);

    // The first error, if there was one.
    status error() const;

    // The time that the oldest read in flight has taken, by `clock`; 0 without one.
    std::chrono::milliseconds oldest_read() const;

    // Drops all that is queued, and waits until no read is in flight. False if one hangs: the loader and the memory
    // that it reads into must then live as long as the process.
    bool end();

    // Copies to one device with memory of its own: their bytes, and the time with any in flight.
    struct transfers {
        uint64_t bytes = 0;
        uint64_t ns    = 0;
    };

    transfers transferred(ggml_backend_dev_t device) const;

    bool     arrived(const load_state & state, part_set parts) const;
    auto     arrived(const load_state * states, size_t n, part_set parts) const -> std::vector<bool>;
    part_set requested(const load_state & state) const;

    // Forgets the parts that have arrived. REQUIRES: none is in flight.
    void reset(load_state & state);

  private:
    // The queue of the disk or of one link.
    struct lane {
        explicit lane(size_t max_prefetches = 1) : queue(max_prefetches) {}

        chunk_queue queue;
        condition   work; // a chunk may begin, or stop_
    };

    struct link {
        lane                                  copies;
        transfers                             done;
        int                                   n_in_flight = 0;
        std::chrono::steady_clock::time_point counted_until; // done.ns counts until then, while copies are in flight

        size_t bytes_in(double seconds) const; // bytes that the link moves; 0 before the first copy
    };

    // A chunk for a device whose source, a part in host memory, is still being read.
    struct parked_copy {
        chunk              what;
        const load_state * from; // state of the source
        load_urgency       urgency;
    };

    using steady = std::chrono::steady_clock;

    void   join() EXCLUDES(mutex_);
    void   run(const std::function<void()> & work) EXCLUDES(mutex_); // with the mutex held
    status read(const chunk & next, staging_buffer & staging) EXCLUDES(mutex_);
    void copy(ggml_backend_dev_t device, const std::vector<chunk> & chunks, ggml_backend_ptr & stream) EXCLUDES(mutex_);
    void set(const chunk & next, const char * rows) EXCLUDES(mutex_);

    // Counts the time until now.
    void change_transfers(ggml_backend_dev_t device, int change, size_t n_bytes) EXCLUDES(mutex_);

    void   stop() REQUIRES(mutex_);
    void   run_reads(size_t thread) REQUIRES(mutex_);
    void   run_copies(ggml_backend_dev_t device) REQUIRES(mutex_);
    void   give_up(const std::exception & e) REQUIRES(mutex_);
    lane & lane_of(const chunk & c) REQUIRES(mutex_) { return c.source ? link_of(c.to.buffer).copies : disk_; }
    link & link_of(ggml_backend_buffer_t buffer) REQUIRES(mutex_);

    // Calls visit(lane &) for the lanes of the disk and of all links.
    template <typename Visit>
    void each_lane(Visit visit) REQUIRES(mutex_) {
        visit(disk_);
        for (auto & entry : links_) {
            visit(entry.second.copies);
        }
    }

    steady::duration age_of_oldest_read() const REQUIRES(mutex_);

    bool hangs() const REQUIRES(mutex_) { return age_of_oldest_read() >= patience_; }

    bool is_due(const load_state & state, part_id part, load_urgency urgency) REQUIRES(mutex_);
    void mark_requested(const std::vector<chunk> & chunks) REQUIRES(mutex_);
    void enqueue(const std::vector<chunk> & chunks, load_urgency urgency) REQUIRES(mutex_);
    void end_parked(const load_state & from, part_id part, bool ok) REQUIRES(mutex_);
    void wait_until(const std::function<bool()> & is_over) REQUIRES(mutex_);
    void stall(const std::function<bool()> & is_over) REQUIRES(mutex_);
    void promote(const load_state & state, part_id part) REQUIRES(mutex_);
    void drop_prefetches(load_state & state, part_set parts) REQUIRES(mutex_);
    void wake(lane & where, size_t n_chunks) REQUIRES(mutex_);
    void finish(const chunk & done, const status & result) REQUIRES(mutex_);
    void end_chunk(const chunk & ended, bool ok) REQUIRES(mutex_);
    void fail(const status & error) REQUIRES(mutex_);

    file_reader &                 reader_;
    stats &                       stats_;
    const ggml_backend_buffer_ptr staging_memory_; // chunk_size for each thread, in huge pages; null: no memory left
    const steady::duration        patience_;

    mutable mutex mutex_;
    condition     progress_; // a part arrived or never will, or error_ was set

    lane disk_                                     GUARDED_BY(mutex_);
    std::map<ggml_backend_dev_t, link> links_      GUARDED_BY(mutex_); // the keys are constant
    std::vector<parked_copy> parked_               GUARDED_BY(mutex_);
    mutable awake_clock clock_                     GUARDED_BY(mutex_); // asked in const methods too
    std::vector<steady::time_point> reading_since_ GUARDED_BY(mutex_); // [thread], by clock_; max(): it does not read
    status error_                                  GUARDED_BY(mutex_);
    status no_memory_ GUARDED_BY(mutex_) = status::error("no memory is left to read experts");
    bool is_broken_   GUARDED_BY(mutex_) = false; // a part may never arrive
    bool stop_        GUARDED_BY(mutex_) = false;

    std::vector<std::thread> threads_; // constant after construction
};

} // namespace hobbit
