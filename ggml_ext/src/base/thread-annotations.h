// SPDX-License-Identifier: MIT
#pragma once

#include <condition_variable>
#include <mutex>

// Names for clang's analysis of locks (-Wthread-safety), which `make thread-safety` runs. Other compilers ignore them.
#ifdef __clang__
#define HOBBIT_ATTRIBUTE(x) __attribute__((x))
#else
#define HOBBIT_ATTRIBUTE(x)
#endif

#define CAPABILITY HOBBIT_ATTRIBUTE(capability("mutex"))
#define SCOPED_CAPABILITY HOBBIT_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(m) HOBBIT_ATTRIBUTE(guarded_by(m))                    // a variable: read and written with m held
#define REQUIRES(...) HOBBIT_ATTRIBUTE(requires_capability(__VA_ARGS__)) // a function: called with it held
#define EXCLUDES(...) HOBBIT_ATTRIBUTE(locks_excluded(__VA_ARGS__))      // a function: takes it itself
#define ACQUIRE(...) HOBBIT_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define RELEASE(...) HOBBIT_ATTRIBUTE(release_capability(__VA_ARGS__))

namespace hobbit {

// A std::mutex that the analysis knows; libstdc++'s own has no annotations.
class CAPABILITY mutex {
  public:
    void lock() ACQUIRE() { native_.lock(); }
    void unlock() RELEASE() { native_.unlock(); }

  private:
    friend class condition;

    std::mutex native_;
};

// Holds a mutex during its life.
class SCOPED_CAPABILITY mutex_lock {
  public:
    explicit mutex_lock(mutex & m) ACQUIRE(m) : mutex_(m) { m.lock(); }
    ~mutex_lock() RELEASE() { mutex_.unlock(); }

    mutex_lock(const mutex_lock &) = delete;

  private:
    mutex & mutex_;
};

// Releases a held mutex during its life. After an exception the mutex is held again.
class SCOPED_CAPABILITY mutex_release {
  public:
    explicit mutex_release(mutex & m) RELEASE(m) : mutex_(m) { m.unlock(); }
    ~mutex_release() RELEASE() { mutex_.lock(); }

    mutex_release(const mutex_release &) = delete;

  private:
    mutex & mutex_;
};

// A condition variable. Waiting releases the mutex. A predicate that reads guarded fields is a lambda with REQUIRES.
class condition {
  public:
    template <typename Predicate>
    void wait(mutex & m, Predicate is_over) REQUIRES(m) {
        adopted(m, [&](auto & lock) { native_.wait(lock, is_over); });
    }

    // Returns is_over().
    template <typename Duration, typename Predicate>
    bool wait_for(mutex & m, Duration time, Predicate is_over) REQUIRES(m) {
        return adopted(m, [&](auto & lock) { return native_.wait_for(lock, time, is_over); });
    }

    void notify_one() { native_.notify_one(); }
    void notify_all() { native_.notify_all(); }

  private:
    // The caller keeps the mutex, also after an exception.
    template <typename F>
    static auto adopted(mutex & m, F wait) REQUIRES(m) {
        struct keeper {
            std::unique_lock<std::mutex> lock;
            ~keeper() { lock.release(); }
        } held{ std::unique_lock<std::mutex>(m.native_, std::adopt_lock) };
        return wait(held.lock);
    }

    std::condition_variable native_;
};

} // namespace hobbit
