// SPDX-License-Identifier: MIT
// The threads that compute a graph together: a calling thread and its workers. GCC's calls for ggml's OpenMP end here.
// A thread that waits for the others spins and then sleeps. It spins long while all of them get a core when they want
// one, and briefly once one has to wait for it: the spinning would take the time that the other lacks. A user fixes the
// number of spins by GOMP_SPINCOUNT or OMP_WAIT_POLICY, which have libgomp's meaning.

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ggml-backend.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr uint64_t short_spins   = 300;   // some microseconds
constexpr uint64_t long_spins    = 30000; // about a millisecond
constexpr int64_t  sample_ns     = 48'000'000;
constexpr int64_t  delayed_share = 8; // a thread is delayed if it waits for a core longer than 1/8 of its time
constexpr int64_t  least_pause   = 200'000'000; // nanoseconds of short spins after a delay
constexpr int64_t  most_pause    = 3'200'000'000;

int64_t now_ns(clockid_t clock = CLOCK_MONOTONIC_COARSE) { // that takes some nanoseconds; exact to some milliseconds
    timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

// Nanoseconds that threads waited at barriers, by their number in a team: few threads share a cache line.
struct alignas(64) wait_time {
    std::atomic<int64_t> ns = 0;
} waited[32];

// The spins that the user's environment fixes, or -1.
int64_t spins_of_environment() {
    if (const char * count = std::getenv("GOMP_SPINCOUNT")) {
        char *                   end    = nullptr;
        const unsigned long long number = std::strtoull(count, &end, 10);
        return end != count ? int64_t(number & INT64_MAX) : INT64_MAX; // "infinity"
    }
    const char * policy = std::getenv("OMP_WAIT_POLICY");
    if (policy == nullptr) {
        return -1;
    }
    return strcasecmp(policy, "passive") == 0 ? 0 : strcasecmp(policy, "active") == 0 ? INT64_MAX : -1;
}

// A number that threads wait for to change.
class alignas(64) signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void change() {
        value_.fetch_add(1);
        if (sleepers_.load() > 0) {
            syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
    }

    void wait_for_change(uint32_t old, uint64_t spins) {
        for (uint64_t i = 0; i < spins; i++) {
            if (value() != old) {
                return;
            }
            relax();
        }
        sleepers_.fetch_add(1);
        while (value_.load() == old) {
            syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
        }
        sleepers_.fetch_sub(1);
    }

  private:
    std::atomic<uint32_t> value_    = 0;
    std::atomic<int>      sleepers_ = 0;
};

// Time that the kernel says a thread waited for a core, sampled by the thread itself.
class core_delay {
  public:
    enum class result { unknown, none, delayed };

    core_delay() : file_(open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {}
    core_delay(const core_delay &) = delete;
    ~core_delay() {
        if (file_ >= 0) {
            close(file_);
        }
    }

    // The delays since `begin` or a later sample, if that is long enough ago.
    result since(int64_t begin, int64_t now) {
        const bool is_first = sampled_ < begin;
        if (!is_first && now - sampled_ < sample_ns) {
            return result::unknown;
        }
        const int64_t before  = delay_;
        const int64_t elapsed = now - sampled_;
        delay_                = read();
        sampled_              = now;
        return is_first                                      ? result::unknown
               : (delay_ - before) * delayed_share > elapsed ? result::delayed
                                                             : result::none;
    }

  private:
    // Nanoseconds; 0 if the kernel does not count them.
    int64_t read() const {
        char       text[96] = {};
        long long  ran = 0, delay = 0;
        const bool has_text = file_ >= 0 && pread(file_, text, sizeof text - 1, 0) > 0;
        return has_text && std::sscanf(text, "%lld %lld", &ran, &delay) == 2 ? delay : 0;
    }

    const int file_;
    int64_t   sampled_ = -1;
    int64_t   delay_   = 0;
};

class thread_team {
  public:
    static inline thread_local thread_team * here   = nullptr; // the thread's
    static inline thread_local int           own_i  = 0;       // its number there
    static inline thread_local bool          begins = false;   // before its first barrier

    thread_team()                    = default;
    thread_team(const thread_team &) = delete;

    ~thread_team() {
        if (!is_of_this_process()) { // a fork has no workers to join
            for (std::unique_ptr<worker> & each : workers_) {
                (void) each.release();
            }
            return;
        }
        work_ = nullptr;
        for (std::unique_ptr<worker> & each : workers_) {
            each->start.change();
            each->thread.join();
        }
    }

    bool is_of_this_process() const { return process_ == getpid(); }

    // Returns how many of n_threads there are.
    int grow(int n_threads) {
        while (int(workers_.size()) < n_threads - 1) {
            const int i = int(workers_.size()) + 1;
            workers_.push_back(std::make_unique<worker>());
            try {
                worker * const added = workers_.back().get();
                added->thread        = std::thread([this, added, i] { serve(*added, i); });
            } catch (const std::system_error &) {
                workers_.pop_back();
                return i;
            }
        }
        return n_threads;
    }

    // The first barrier is behind what thread 0 does alone: it starts the others there, and nobody waits.
    void run(int n_threads, void (*work)(void *), void * data) {
        n_threads_ = n_threads;
        work_      = work;
        data_      = data;
        do_work(0);
    }

    int n_threads() const { return n_threads_; }

    void wait() {
        if (std::exchange(begins, false)) {
            for (int i = 1; own_i == 0 && i < n_threads_; i++) {
                workers_[size_t(i - 1)]->start.change();
            }
            return;
        }
        const uint32_t phase = phase_.value();
        const int      last  = n_threads_ - 1; // read before the last thread may begin another run
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == last) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.change();
        } else {
            const int64_t begin = now_ns(CLOCK_MONOTONIC);
            phase_.wait_for_change(phase, spins());
            waited[size_t(own_i) % std::size(waited)].ns.fetch_add(now_ns(CLOCK_MONOTONIC) - begin);
        }
    }

  private:
    struct worker {
        signal      start;
        std::thread thread;
    };

    void do_work(int i) {
        here   = this;
        own_i  = i;
        begins = true;
        work_(data_);
    }

    void serve(worker & self, int i) {
        for (uint32_t seen = 0;; seen++) {
            self.start.wait_for_change(seen, spins());
            if (work_ == nullptr) {
                return;
            }
            do_work(i);
        }
    }

    // How long the calling thread of the team spins before it sleeps. Delays are judged by long spins alone: between
    // short ones the threads sleep, and others take their cores, whether or not these are short.
    uint64_t spins() {
        static const int64_t fixed = spins_of_environment();
        if (fixed >= 0) {
            return uint64_t(fixed);
        }
        thread_local core_delay delay;
        const int64_t           now   = now_ns();
        const int64_t           begin = long_from_.load(std::memory_order_relaxed);
        if (now < begin) {
            return short_spins;
        }
        switch (delay.since(begin, now)) {
            case core_delay::result::unknown: return long_spins;
            case core_delay::result::none:    pause_.store(least_pause, std::memory_order_relaxed); return long_spins;
            case core_delay::result::delayed: break;
        }
        const int64_t pause = pause_.load(std::memory_order_relaxed);
        pause_.store(std::min(2 * pause, most_pause), std::memory_order_relaxed);
        long_from_.store(now + pause, std::memory_order_relaxed);
        return short_spins;
    }

    const pid_t                          process_ = getpid();
    std::vector<std::unique_ptr<worker>> workers_;
    int                                  n_threads_ = 1;       // that work
    void (*work_)(void *)                           = nullptr; // null: the workers end
    void *               data_                      = nullptr;
    std::atomic<int64_t> long_from_                 = 0;           // threads spin briefly before
    std::atomic<int64_t> pause_                     = least_pause; // the next time of short spins
    alignas(64) std::atomic<int> arrived_           = 0;
    signal phase_;
};

} // namespace

#pragma GCC visibility push(hidden) // another libgomp of the process gets the calls of others, and none of ours
extern "C" {

// Calls work(data) in the calling thread and its workers: fewer than wanted if no more can be started. They start when
// first needed, and end with the calling thread. REQUIRES: `work` begins as a `single` and ends with a barrier.
void GOMP_parallel(void (*work)(void *), void * data, unsigned n_wanted, unsigned /* flags */) {
    thread_local std::unique_ptr<thread_team> team;
    if (!team || !team->is_of_this_process()) {
        team = std::make_unique<thread_team>();
    }
    team->run(team->grow(int(n_wanted)), work, data);
}

void GOMP_barrier() {
    thread_team::here->wait();
}

bool GOMP_single_start() {
    return thread_team::own_i == 0;
}

int omp_get_num_threads() {
    return thread_team::here->n_threads();
}

int omp_get_thread_num() {
    return thread_team::own_i;
}
#pragma GCC visibility pop

// Nanoseconds that threads have waited for each other at barriers so far: the sum over the process's teams.
GGML_BACKEND_API int64_t ggml_cpu_barrier_wait() {
    return std::accumulate(std::begin(waited), std::end(waited), int64_t(0),
                           [](int64_t sum, const wait_time & each) { return sum + each.ns.load(); });
}
}
