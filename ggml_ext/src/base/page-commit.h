// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
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
    void start(std::vector<range> ranges, uint64_t spare = 0);

    // Bytes whose pages were taken, of all ranges in their order.
    uint64_t committed() const { return committed_; }

    // Blocks until the thread has ended: end() leaves the rest of the pages, wait() takes all.
    void end();
    void wait();

  private:
    void run(const std::vector<range> & ranges, uint64_t spare);

    std::atomic<bool>     stop_{ false };
    std::atomic<uint64_t> committed_{ 0 };
    std::thread           thread_;
};

} // namespace hobbit
