// SPDX-License-Identifier: MIT
//
// Tells the modelled device of the locks and threads of a process: LD_PRELOAD=libmodelled-locks.so
#include "locks.h"

#include <dlfcn.h>
#include <pthread.h>

const lock_listener * modelled_locks = nullptr; // set before the threads that matter begin

template <typename F>
static F * next(const char * name) {
    return reinterpret_cast<F *>(dlsym(RTLD_NEXT, name));
}

static void acquired(const void * lock) {
    if (modelled_locks) {
        modelled_locks->acquired(lock);
    }
}

static void releasing(const void * lock) {
    if (modelled_locks) {
        modelled_locks->releasing(lock);
    }
}

//
// threads
//

struct beginning {
    void * (*run)(void *);
    void * argument;
};

static void * begin(void * given) {
    acquired(given);
    const beginning own = *static_cast<beginning *>(given);
    delete static_cast<beginning *>(given);
    void * result = own.run(own.argument);
    releasing(reinterpret_cast<const void *>(pthread_self()));
    return result;
}

extern "C" {

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    static const auto real = next<decltype(pthread_create)>("pthread_create");
    auto *            made = new beginning{ run, argument };
    releasing(made);
    return real(thread, attributes, begin, made);
}

int pthread_join(pthread_t thread, void ** result) {
    static const auto real = next<decltype(pthread_join)>("pthread_join");
    const int         code = real(thread, result);
    if (code == 0) {
        acquired(reinterpret_cast<const void *>(thread));
    }
    return code;
}

//
// locks
//

int pthread_mutex_lock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
    const int         code = real(mutex);
    acquired(mutex);
    return code;
}

int pthread_mutex_trylock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_trylock)>("pthread_mutex_trylock");
    const int         code = real(mutex);
    if (code == 0) {
        acquired(mutex);
    }
    return code;
}

int pthread_mutex_unlock(pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_mutex_unlock)>("pthread_mutex_unlock");
    releasing(mutex);
    return real(mutex);
}

int pthread_cond_wait(pthread_cond_t * condition, pthread_mutex_t * mutex) {
    static const auto real = next<decltype(pthread_cond_wait)>("pthread_cond_wait");
    releasing(mutex);
    const int code = real(condition, mutex);
    acquired(mutex);
    return code;
}

int pthread_cond_timedwait(pthread_cond_t * condition, pthread_mutex_t * mutex, const timespec * time) {
    static const auto real = next<decltype(pthread_cond_timedwait)>("pthread_cond_timedwait");
    releasing(mutex);
    const int code = real(condition, mutex, time);
    acquired(mutex);
    return code;
}

int pthread_cond_clockwait(pthread_cond_t * condition, pthread_mutex_t * mutex, clockid_t clock,
                           const timespec * time) {
    static const auto real = next<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
    releasing(mutex);
    const int code = real(condition, mutex, clock, time);
    acquired(mutex);
    return code;
}

} // extern "C"
