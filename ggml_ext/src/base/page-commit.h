// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <vector>

namespace hobbit {

// Takes the pages of memory from the system before their first use, in a background thread of the lowest priority.
// Programs that start later then see how much memory is left, and the first prompt does not wait for page faults.
// Where the kernel cannot do that (Linux before 5.14), pages are taken at their first use.
//
// Thread-safety: none, but the memory itself may be used at the same time.
class page_commit {
  public:
    struct range {
        char * begin; // a multiple of the page size
        size_t size;
    };

    ~page_commit() { end(); }

    // REQUIRES: not started, or ended since. The memory must stay mapped until end() or wait() returns.
    // `spare`: it stops where the system has fewer bytes left than this; 0: it does not look.
    void start(std::vector<range> ranges, uint64_t spare = 0) {
        stop_   = false;
        thread_ = std::thread([this, ranges = std::move(ranges), spare]() {
            try {
                run(ranges, spare);
            } catch (const std::exception &) {
                // no memory even to look: pages are taken at their first use
            }
        });
    }

    // Blocks until the thread has ended: end() leaves the rest of the pages, wait() takes all.
    void end() {
        stop_ = true;
        wait();
    }

    void wait() {
        if (thread_.joinable()) {
            thread_.join();
        }
    }

  private:
    static constexpr size_t STEP           = 8u << 20; // end() waits for one step at most
    static constexpr int    LOWEST         = 19;       // lowest priority of nice(2)
    static constexpr int    POPULATE_WRITE = 23;       // MADV_POPULATE_WRITE, which older headers lack

    void run(const std::vector<range> & ranges, uint64_t spare) {
        setpriority(PRIO_PROCESS, 0, LOWEST); // on Linux, of the calling thread alone
        for (const range & r : ranges) {
            for (size_t done = 0; done < r.size; done += STEP) {
                const size_t step = std::min(STEP, r.size - done);
                if (stop_ || (spare > 0 && hobbit_available_memory() < spare + step) ||
                    madvise(r.begin + done, step, POPULATE_WRITE) != 0) {
                    return;
                }
            }
        }
    }

    std::atomic<bool> stop_{ false };
    std::thread       thread_;
};

} // namespace hobbit
