// SPDX-License-Identifier: MIT
#pragma once

// The library that is loaded before all others (LD_PRELOAD) calls this for locks and threads. The modelled device sets
// `modelled_locks`.
struct lock_listener {
    void (*acquired)(const void * lock);
    void (*releasing)(const void * lock);
    void * (*forking)();            // a thread makes another
    void (*beginning)(void * from); // the other begins
    void * (*ending)();             // a thread ends
    void (*joined)(void * ended);   // another has waited for that
};

extern "C" const lock_listener * modelled_locks;
