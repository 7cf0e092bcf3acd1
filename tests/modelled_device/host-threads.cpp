// SPDX-License-Identifier: MIT
#include "host-threads.h"

#include "modelled-device.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <list>
#include <pthread.h>
#include <semaphore.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace modelled {

virtual_clock & host_threads::clock() {
    static auto & one = *new virtual_clock([] { // threads may outlive main()
        prices p;
        for (const auto & [name, field] : prices::fields) {
            configure(name, p.*field);
        }
        return p;
    }());
    return one;
}

//
// the C library's functions
//

template <typename T>
static T * real(const char * name, const char * version = nullptr) {
    return reinterpret_cast<T *>(version ? dlvsym(RTLD_NEXT, name, version) : dlsym(RTLD_NEXT, name));
}

constexpr const char * OWN = "GLIBC_2.3.2"; // the version of conditions that programs are linked to

//
// threads
//

struct host_thread {
    enum { running, ready, blocked, ended } state = ready;
    ns_t         now                              = 0;
    bool         is_main                          = false;
    const void * waits_for                        = nullptr; // a mutex, a condition or a thread
    ns_t         deadline                         = -1;      // -1: it waits for ever
    bool         is_late                          = false;
    sem_t        turn                             = {}; // posted once it may run
    pthread_t    id                               = {};
    void * (*work)(void *)                        = nullptr;
    void * argument                               = nullptr;

    host_thread() { sem_init(&turn, 0, 0); }
};

// Only the thread that runs uses it.
static std::list<host_thread> & threads() {
    static auto & all = *new std::list<host_thread>;
    return all;
}

static thread_local host_thread * self = nullptr;

static ns_t time_of(const host_thread & t) {
    return t.state == host_thread::blocked ? std::max(t.now, t.deadline) : t.now;
}

static void await_turn() {
    while (sem_wait(&self->turn) != 0) { // a signal ends it early
    }
}

// Gives the turn to the earliest thread that can run, and returns once the caller has it again; for an ended caller
// at once. REQUIRES: the caller is not running
static void hand_over() {
    host_thread * next = nullptr;
    for (host_thread & t : threads()) {
        const bool can_run = t.state == host_thread::ready || (t.state == host_thread::blocked && t.deadline >= 0);
        if (can_run && (!next || time_of(t) < time_of(*next))) {
            next = &t;
        }
    }
    if (!next) {
        std::fputs("modelled device: all threads wait for each other\n", stderr);
        std::abort();
    }
    next->is_late   = next->state == host_thread::blocked;
    next->now       = time_of(*next);
    next->state     = host_thread::running;
    next->waits_for = nullptr;
    next->deadline  = -1;
    if (next == self) {
        return;
    }
    const bool is_over = self->state == host_thread::ended;
    sem_post(&next->turn);
    if (!is_over) {
        await_turn();
    }
}

// Lets threads run that are behind the caller.
static void yield() {
    self->state = host_thread::ready;
    hand_over();
}

// Returns false if the deadline came first.
static bool block(const void * on, ns_t deadline = -1) {
    self->state     = host_thread::blocked;
    self->waits_for = on;
    self->deadline  = deadline;
    hand_over();
    return !self->is_late;
}

static void wake(const void * waited_for, bool all, double after_us) {
    for (host_thread & t : threads()) {
        if (t.state == host_thread::blocked && t.waits_for == waited_for) {
            t.state    = host_thread::ready;
            t.deadline = -1;
            t.now      = std::max(t.now, self->now + virtual_clock::us(after_us));
            if (!all) {
                return;
            }
        }
    }
}

//
// interface
//

void host_threads::begin() {
    host_thread & main = threads().emplace_back();
    main.state         = host_thread::running;
    main.is_main       = true;
    self               = &main;
}

ns_t & host_threads::now() {
    static thread_local ns_t none = 0; // for a thread that takes no part
    return self ? self->now : none;
}

} // namespace modelled

using namespace modelled;

//
// interposed functions
//

static int lock(pthread_mutex_t * m) {
    static auto * try_lock = real<int(pthread_mutex_t *)>("pthread_mutex_trylock");
    while (int error = try_lock(m)) {
        if (error != EBUSY) {
            return error;
        }
        block(m);
    }
    return 0;
}

static int wait(pthread_cond_t * c, pthread_mutex_t * m, ns_t deadline) {
    pthread_mutex_unlock(m);
    const bool in_time = block(c, deadline);
    const int  error   = lock(m);
    return error ? error : in_time ? 0 : ETIMEDOUT;
}

static void notify(pthread_cond_t * c, bool all) {
    wake(c, all, host_threads::clock().price().wake_us);
}

static void * run(void * argument) {
    self = static_cast<host_thread *>(argument);
    await_turn();
    void * result = self->work(self->argument);
    wake(self, true, 0);
    self->state = host_thread::ended;
    hand_over();
    self = nullptr;
    return result;
}

// A file that tells the memory of the machine that is modelled.
static const std::string & meminfo() {
    static const std::string path = [] {
        const int  file = memfd_create("meminfo", MFD_CLOEXEC);
        const auto kb   = std::to_string(int64_t(host_threads::clock().price().host_gb * 1e6));
        const auto text = "MemTotal: " + kb + " kB\nMemAvailable: " + kb + " kB\n";
        return write(file, text.data(), text.size()) < 0 ? "" : "/proc/self/fd/" + std::to_string(file);
    }();
    return path;
}

#pragma GCC visibility push(default)
extern "C" {
int pthread_mutex_lock(pthread_mutex_t * m) {
    static auto * real_lock = real<decltype(pthread_mutex_lock)>("pthread_mutex_lock");
    if (!self) {
        return real_lock(m);
    }
    yield();
    host_threads::clock().lock(self->now);
    return lock(m);
}

int pthread_mutex_unlock(pthread_mutex_t * m) {
    static auto * unlock = real<decltype(pthread_mutex_unlock)>("pthread_mutex_unlock");
    if (self) {
        wake(m, true, 0);
    }
    return unlock(m);
}

int pthread_cond_wait(pthread_cond_t * c, pthread_mutex_t * m) {
    static auto * real_wait = real<decltype(pthread_cond_wait)>("pthread_cond_wait", OWN);
    return self ? wait(c, m, -1) : real_wait(c, m);
}

int pthread_cond_clockwait(pthread_cond_t * c, pthread_mutex_t * m, clockid_t id, const timespec * until) {
    static auto * clockwait = real<decltype(pthread_cond_clockwait)>("pthread_cond_clockwait");
    return self ? wait(c, m, ns_t(until->tv_sec) * 1000000000 + until->tv_nsec) : clockwait(c, m, id, until);
}

int pthread_cond_signal(pthread_cond_t * c) {
    static auto * signal = real<decltype(pthread_cond_signal)>("pthread_cond_signal", OWN);
    if (self) {
        notify(c, false);
    }
    return signal(c);
}

int pthread_cond_broadcast(pthread_cond_t * c) {
    static auto * broadcast = real<decltype(pthread_cond_broadcast)>("pthread_cond_broadcast", OWN);
    if (self) {
        notify(c, true);
    }
    return broadcast(c);
}

int pthread_create(pthread_t * id, const pthread_attr_t * attributes, void * (*work)(void *), void * argument) {
    static auto * create = real<decltype(pthread_create)>("pthread_create");
    if (!self) {
        return create(id, attributes, work, argument);
    }
    host_thread & made = threads().emplace_back();
    made.now           = self->now;
    made.work          = work;
    made.argument      = argument;
    const int error    = create(id, attributes, run, &made);
    if (error) {
        threads().pop_back();
    } else {
        made.id = *id;
    }
    return error;
}

int pthread_join(pthread_t id, void ** result) {
    static auto * join = real<int(pthread_t, void **)>("pthread_join");
    if (self) {
        for (host_thread & t : threads()) {
            while (pthread_equal(t.id, id) && t.state != host_thread::ended) {
                block(&t);
            }
        }
    }
    return join(id, result);
}

// std::chrono::steady_clock::now()
int64_t _ZNSt6chrono3_V212steady_clock3nowEv() {
    if (self) {
        return self->now;
    }
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// The experts' values are not wanted: what is not read stays a hole in memory, as it is one in the file.
ssize_t pread(int file, void * to, size_t size, off_t offset) {
    static auto * read = real<ssize_t(int, void *, size_t, off_t)>("pread");
    struct stat   st;
    if (!self || self->is_main || fstat(file, &st) != 0) {
        return read(file, to, size, offset);
    }
    if (const double gbs = host_threads::clock().price().disk_gbs; gbs > 0) {
        yield();
        host_threads::clock().read(self->now, size, gbs);
    }
    return std::min<ssize_t>(ssize_t(size), std::max<ssize_t>(0, st.st_size - offset));
}

FILE * fopen64(const char * path, const char * mode) {
    static auto * open = real<FILE *(const char *, const char *)>("fopen64");
    return open(self && std::strcmp(path, "/proc/meminfo") == 0 ? meminfo().c_str() : path, mode);
}

// Nothing of a mapping is brought in before it is used.
void * mmap(void * at, size_t size, int access, int flags, int file, off_t from) noexcept {
    static auto * map = real<void *(void *, size_t, int, int, int, off_t)>("mmap");
    return map(at, size, access, self ? flags & ~MAP_POPULATE : flags, file, from);
}

int posix_madvise(void * at, size_t size, int advice) noexcept {
    static auto * advise = real<int(void *, size_t, int)>("posix_madvise");
    return self && advice == POSIX_MADV_WILLNEED ? 0 : advise(at, size, advice);
}

int madvise(void * at, size_t size, int advice) noexcept {
    static auto * advise   = real<int(void *, size_t, int)>("madvise");
    constexpr int populate = 23; // MADV_POPULATE_WRITE
    if (self && advice == populate) {
        errno = ENOSYS;
        return -1;
    }
    return self && advice == MADV_HUGEPAGE ? 0 : advise(at, size, advice);
}
}
#pragma GCC visibility pop
