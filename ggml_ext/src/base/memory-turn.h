// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <memory>

namespace hobbit {

// A lock between processes: its holder measures the system's free memory and allocates its pools. Otherwise
// programs that start at the same time would all plan with the same free bytes. A process has one turn at a
// time, however many of its models share it; it ends with the last reference.
//
// Processes exclude each other by a lock on /proc/meminfo, so only where they see the same one. Where that file cannot
// be locked, a turn excludes nobody.
//
// Thread-safety: all functions may be called from any thread.
class memory_turn {
  public:
    // Waits while another process has its turn. If that process still has it after `patience`: null, or a turn beside
    // the other one, which excludes nobody.
    static std::shared_ptr<memory_turn> take(std::chrono::milliseconds patience, bool or_beside = false);

    // This process's turn; null: it has none.
    static std::shared_ptr<memory_turn> current();

    ~memory_turn();

    memory_turn(const memory_turn &)             = delete;
    memory_turn & operator=(const memory_turn &) = delete;

  private:
    explicit memory_turn(int file);

    const int   file_; // locked; -1: none
    const pid_t process_;
};

} // namespace hobbit
