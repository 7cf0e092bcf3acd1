// SPDX-License-Identifier: MIT
#include "base/page-commit.h"

#include "base/system-memory.h"

#include <algorithm>
#include <cstdint>
#include <sys/mman.h>
#include <sys/resource.h>

namespace hobbit {

static constexpr size_t STEP           = 8u << 20; // end() waits for one step at most
static constexpr int    LOWEST         = 19;       // lowest priority of nice(2)
static constexpr int    POPULATE_WRITE = 23;       // MADV_POPULATE_WRITE, which older headers lack

void page_commit::start(std::vector<range> ranges, uint64_t spare) {
    stop_      = false;
    committed_ = 0;
    thread_    = std::thread([this, ranges = std::move(ranges), spare]() {
        try {
            run(ranges, spare);
        } catch (const std::exception &) {
            // no memory even to look: pages are taken at their first use
        }
    });
}

void page_commit::end() {
    stop_ = true;
    wait();
}

void page_commit::wait() {
    if (thread_.joinable()) {
        thread_.join();
    }
}

void page_commit::run(const std::vector<range> & ranges, uint64_t spare) {
    setpriority(PRIO_PROCESS, 0, LOWEST); // on Linux, of the calling thread alone
    for (const range & r : ranges) {
        for (size_t done = 0; done < r.size; done += STEP) {
            const size_t step = std::min(STEP, r.size - done);
            if (stop_ || (spare > 0 && available_memory() < spare + step) ||
                madvise(r.begin + done, step, POPULATE_WRITE) != 0) {
                return;
            }
            committed_ += step;
        }
    }
}

} // namespace hobbit
