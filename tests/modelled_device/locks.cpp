// SPDX-License-Identifier: MIT
//
// Tells the modelled device of the locks and threads of a process: LD_PRELOAD=libmodelled-locks.so
#include "locks.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

static constexpr lock_listener nobody = { [](const void *, bool) {}, [](const void *) {}, [](void *, size_t) {} };

const lock_listener * modelled_locks = &nobody; // set before the threads that matter begin

template <typename F>
static F * next(const char * name) {
    return reinterpret_cast<F *>(dlsym(RTLD_NEXT, name));
}

//
// threads
//

struct beginning {
    void * (*run)(void *);
    void * argument;
};

static void * begin(void * given) {
    modelled_locks->acquired(given, true);
    const beginning own = *static_cast<beginning *>(given);
    delete static_cast<beginning *>(given);
    void * result = own.run(own.argument);
    modelled_locks->releasing(reinterpret_cast<const void *>(pthread_self()));
    return result;
}

extern "C" {

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    static const auto real = next<decltype(pthread_create)>("pthread_create");
    auto *            made = new beginning{ run, argument };
    modelled_locks->releasing(made);
    return real(thread, attributes, begin, made);
}

int pthread_join(pthread_t thread, void ** result) {
    static const auto real = next<decltype(pthread_join)>("pthread_join");
    const int         code = real(thread, result);
    if (code == 0) {
        modelled_locks->acquired(reinterpret_cast<const void *>(thread), true);
    }
    return code;
}

//
// locks: ggml, llama.cpp and hobbit call no other functions for them
//

int pthread_mutex_lock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
    const int         code = real(mutex);
    modelled_locks->acquired(mutex, false);
    return code;
}

int pthread_mutex_unlock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_unlock)>("pthread_mutex_unlock");
    modelled_locks->releasing(mutex);
    return real(mutex);
}

int pthread_cond_wait(pthread_cond_t * condition, pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_cond_wait)>("pthread_cond_wait");
    modelled_locks->releasing(mutex);
    const int code = real(condition, mutex);
    modelled_locks->acquired(mutex, false);
    return code;
}

int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock,
                           const timespec * time) {
    static const auto real = next<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
    modelled_locks->releasing(mutex);
    const int code = real(condition, mutex, clock, time);
    modelled_locks->acquired(mutex, false);
    return code;
}

ssize_t pread(int file, void * to, size_t size, off_t offset) {
    static const auto real = next<decltype(pread)>("pread");
    modelled_locks->reading(to, size);
    return real(file, to, size, offset);
}

} // extern "C"
