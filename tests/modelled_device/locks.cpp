// SPDX-License-Identifier: MIT
//
// Tells the modelled device of the locks and threads of a process: LD_PRELOAD=libmodelled-locks.so
#include "locks.h"

#include <dlfcn.h>
#include <map>
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
    void * from;
};

// Clocks of ended threads, until these are joined.
static pthread_mutex_t               ended_lock = PTHREAD_MUTEX_INITIALIZER;
static std::map<pthread_t, void *> & ended() {
    static auto & all = *new std::map<pthread_t, void *>;
    return all;
}

static void * begin(void * given) {
    const beginning own = *static_cast<beginning *>(given);
    delete static_cast<beginning *>(given);
    if (modelled_locks && own.from) {
        modelled_locks->beginning(own.from);
    }
    void * result = own.run(own.argument);
    if (modelled_locks) {
        void * clock = modelled_locks->ending();
        pthread_mutex_lock(&ended_lock);
        ended()[pthread_self()] = clock;
        pthread_mutex_unlock(&ended_lock);
    }
    return result;
}

extern "C" {

int pthread_create(pthread_t * thread, const pthread_attr_t * attributes, void * (*run)(void *), void * argument) {
    static const auto real = next<decltype(pthread_create)>("pthread_create");
    void *            from = modelled_locks ? modelled_locks->forking() : nullptr;
    return real(thread, attributes, begin, new beginning{ run, argument, from });
}

int pthread_join(pthread_t thread, void ** result) {
    static const auto real = next<decltype(pthread_join)>("pthread_join");
    const int         code = real(thread, result);
    if (code == 0 && modelled_locks) {
        pthread_mutex_lock(&ended_lock);
        const auto found = ended().find(thread);
        void *     clock = found == ended().end() ? nullptr : found->second;
        if (clock) {
            ended().erase(found);
        }
        pthread_mutex_unlock(&ended_lock);
        if (clock) {
            modelled_locks->joined(clock);
        }
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
