// SPDX-License-Identifier: MIT
#pragma once

#include "virtual-clock.h"

namespace modelled {

// The process's threads in virtual time. The library is preloaded (LD_PRELOAD): it stands before the C library's
// functions for threads, and before std::chrono::steady_clock. One thread runs at once, the one that has reached the
// earliest time, and hands over where it locks, waits or signals. So what a thread sees of others has happened in
// virtual time too, and timeouts, measured latencies and timelines are in virtual time. The thread that calls begin()
// and those that are created afterwards take part; others run as ever.
namespace host_threads {

void begin();

// The time that the calling thread has reached.
ns_t & now();

// The process's clock, by the prices of modelled_configure.
virtual_clock & clock();

} // namespace host_threads
} // namespace modelled
