// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

// The library that is loaded before all others (LD_PRELOAD) calls this for locks and threads. A thread that is made,
// and one that ends, counts as a lock: its maker, or the thread itself, releases it, and who begins or has waited
// acquires it, the last to do so: another one may get its address. The modelled device sets `modelled_locks`.
struct lock_listener {
    void (*acquired)(const void * lock, bool is_last);
    void (*releasing)(const void * lock);
    void (*reading)(void * to, size_t size); // the thread reads a file
};

extern "C" const lock_listener * modelled_locks;
