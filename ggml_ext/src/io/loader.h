// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "base/system-memory.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "io/aligned-range.h"
#include "io/chunk-queue.h"
#include "io/device-copy.h"
#include "io/file-reader.h"
#include "model/expert-index.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace hobbit {

// Where a part goes. Without a buffer, data is a multiple of file_reader::alignment and has room for aligned_span() of
// its location: the file is read straight into it, and the part begins at data_offset(). With one, data lies in a
// buffer that nothing is read into straight: a device's memory, or a layout of weights of its own (see
// repacked-layout.h). Rows are read beside it and set as they arrive.
struct part_target {
    char *                data;
    ggml_backend_buffer_t buffer = nullptr;
    matrix_shape          shape  = {}; // where there is a buffer
    size_t                zeros  = 0;  // bytes behind the part that are set to zero with it, where there is a buffer
};

// Memory of one thread that direct I/O may read into; what it holds is lost when it grows.
class staging_buffer {
  public:
    // `lent` is memory at a multiple of file_reader::alignment, which serves as long as it is large enough.
    explicit staging_buffer(char * lent = nullptr, size_t lent_size = 0) : lent_(lent), size_(lent_size) {}

    bool   reserve(size_t size); // false: no memory left
    char * data() const;         // a multiple of file_reader::alignment

  private:
    char *                  lent_;
    ggml_backend_buffer_ptr memory_; // null: what was lent
    size_t                  size_;
};

// Reads experts' parts from their files into slots, in threads of its own and in chunks, so that several threads read
// one part; and copies them from slots in host memory to a device's, in one more thread for each device. Demands of the
// disk take all its threads. A prefetch is begun only while no demand of the same disk or device is queued or in
// flight, and no other prefetch: a demand waits for little. The first error is kept: it is the answer to every wait
// from then on, what was queued is dropped and nothing more is read.
//
// Thread-safety: all methods may be called from any thread. The destructor finishes the reads in flight, drops the
// others and joins the threads.
class loader {
  public:
    // reader and stats must outlive the loader. It copies to those of `devices` that have memory of their own.
    // `staging` is the host memory that what is not read in place goes through.
    loader(file_reader & reader, stats & stats, uint32_t n_threads,
           const std::vector<ggml_backend_dev_t> & devices = {},
           ggml_backend_buffer_type_t              staging = ggml_backend_cpu_buffer_type());
    ~loader();

    loader(const loader &)             = delete;
    loader & operator=(const loader &) = delete;

    // Bytes that one read takes at most, but for a row group that is larger: more in one read, or more reads at once,
    // were not faster. Copies take as many, or what the link moves in fifty microseconds.
    static constexpr size_t chunk_size = 512 * 1024;

    // Bytes that so many threads' reads take on their way to where they cannot be read straight.
    static size_t staging_size(uint32_t n_threads) { return GGML_PAD(n_threads * chunk_size, HUGE_PAGE); }

    // Asks for one part, once: asking again only turns a prefetch that has not arrived into a demand. After an error
    // nothing is asked for.
    void submit(load_state & state, part_id part, const part_location & location, const part_target & target,
                load_urgency urgency);

    // The same for a part that `from` has in host memory at `source`, or will have: what is on its way there is copied
    // when it has arrived, and counts as not asked for where it does not. REQUIRES: asked for in `from`, which is
    // neither reset nor moved before the copy has arrived; target has a buffer of one of the loader's devices.
    void transfer(load_state & state, part_id part, const load_state & from, const char * source,
                  const part_location & location, const part_target & target, load_urgency urgency);

    // Drops the prefetches of parts of which nothing was begun yet: they then count as not asked for.
    void cancel(load_state & state);

    // Drops all prefetches, also those half read, and blocks until nothing is on the way any more.
    void abandon(load_state & state);

    // Blocks until all of `parts` have arrived. REQUIRES: they were asked for, and not cancelled since.
    status wait(const load_state & state, part_set parts);

    // Whether, or until, nothing that was asked for is on the way: it has arrived, or will never.
    bool settled(const load_state & state) const;
    void settle(const load_state & state);

    // The first error, if there was one.
    status error() const;

    // To one device with memory of its own: bytes, and time with any on their way.
    struct transfers {
        uint64_t bytes = 0;
        uint64_t ns    = 0;
    };

    transfers transferred(ggml_backend_dev_t device) const;

    bool     arrived(const load_state & state, part_set parts) const;
    part_set requested(const load_state & state) const;

    // Forgets the parts that have arrived. REQUIRES: none is on the way.
    void reset(load_state & state);

  private:
    // One whose source is on its way.
    struct parked_chunk {
        chunk              what;
        const load_state * from;
        load_urgency       urgency;
    };

    // A way into memory.
    struct lane {
        chunk_queue             queue;
        std::condition_variable work; // a chunk may begin, or stop_
    };

    struct link {
        explicit link(ggml_backend_dev_t device) : stream(device) {}

        lane                                  copies;
        device_copy                           stream; // of the link's thread alone
        transfers                             done;
        int                                   n_in_flight = 0;
        std::chrono::steady_clock::time_point counted_until; // done.ns, while there are any

        size_t bytes_in(double seconds) const; // that it moves; 0 while nothing is known
    };

    static chunk whole_part(load_state & state, part_id part, const part_location & location, const char * source);

    // Pieces of about so many bytes, where there is a buffer.
    static std::vector<chunk> split(const chunk & whole, const part_target & target, size_t piece);

    void   run(size_t thread);
    void   run_link(ggml_backend_dev_t device);
    status read(const chunk & next, staging_buffer & staging);
    void   copy(ggml_backend_dev_t device, const std::vector<chunk> & chunks);
    void   set(const chunk & next, const char * rows);
    void   change_transfers(ggml_backend_dev_t device, int change, size_t n_bytes); // counts the time until now

    // REQUIRES: mutex_ held
    lane &              lane_of(const chunk & c);
    link &              link_of(ggml_backend_buffer_t buffer);
    std::vector<lane *> lanes();
    bool                is_due(const load_state & state, part_id part, load_urgency urgency);
    void                ask_for(const std::vector<chunk> & chunks);
    void                enqueue(const std::vector<chunk> & chunks, load_urgency urgency);
    void                end_parked(const load_state & from, part_id part, bool ok);

    std::vector<parked_chunk> take_parked(const std::function<bool(const parked_chunk &)> & is_taken);

    void promote(const load_state & state, part_id part);
    void drop_prefetches(load_state & state, part_set parts);
    void stall(std::unique_lock<std::mutex> & lock, const std::function<bool()> & is_over);
    void wake(lane & where, size_t n_chunks);
    void finish(const chunk & done, const status & result);
    void end_chunk(const chunk & ended, bool ok);
    void fail(const status & error);
    void count_demands(); // the time until now; before their number changes

    file_reader &                 reader_;
    stats &                       stats_;
    const ggml_backend_buffer_ptr staging_memory_; // chunk_size for each thread, in huge pages; null: no memory left

    mutable std::mutex      mutex_;
    std::condition_variable progress_; // a part arrived or never will, or error_ was set
    // guarded by mutex_
    lane                                  disk_;
    std::map<ggml_backend_dev_t, link>    links_; // constant but for what they hold
    std::vector<parked_chunk>             parked_;
    std::chrono::steady_clock::time_point counted_until_; // disk_demand_ns, while there are demands
    status                                error_;
    bool                                  stop_ = false;

    std::vector<std::thread> threads_; // constant after construction
};

} // namespace hobbit
