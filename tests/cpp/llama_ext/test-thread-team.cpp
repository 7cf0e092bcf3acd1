// SPDX-License-Identifier: MIT
#include "../../llama_ext/cpu/thread-team.cpp" // its functions are hidden

#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace {

// Work of two steps: each thread writes its number, and after a barrier adds those of all.
struct sum_work {
    explicit sum_work(int wanted) : n_threads(wanted) {}

    void run() { GOMP_parallel(step, this, unsigned(n_threads), 0); }

    static void step(void * data) {
        sum_work &   self = *static_cast<sum_work *>(data);
        const size_t i    = size_t(omp_get_thread_num());
        if (GOMP_single_start()) {
            self.numbers.resize(size_t(omp_get_num_threads()));
            self.sums.assign(self.numbers.size(), 0);
        }
        GOMP_barrier();
        self.numbers[i] = int(i) + 1;
        GOMP_barrier();
        for (const int number : self.numbers) {
            self.sums[i] += number;
        }
        GOMP_barrier();
    }

    int              n_threads;
    std::vector<int> numbers;
    std::vector<int> sums;
};

bool sums_are_right(int n_threads) {
    sum_work work(n_threads);
    work.run();
    return work.sums == std::vector<int>(size_t(n_threads), n_threads * (n_threads + 1) / 2);
}

} // namespace

TEST_CASE("threads of a team see what the others wrote before a barrier") {
    for (int i = 0; i < 2000; i++) {
        sum_work work(3);
        work.run();
        REQUIRE(work.sums == std::vector<int>{ 6, 6, 6 });
    }
}

TEST_CASE("a team computes with more threads and with fewer") {
    for (const int n_threads : { 2, 5, 3, 9, 2 }) {
        CHECK(sums_are_right(n_threads));
    }
}

TEST_CASE("workers that sleep are woken") {
    for (int i = 0; i < 5; i++) {
        CHECK(sums_are_right(3));
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

TEST_CASE("the time that threads wait for each other is counted") {
    const auto work = [](void *) { // a thread alone waits for nobody
        GOMP_single_start();
        GOMP_barrier();
        if (omp_get_thread_num() == omp_get_num_threads() - 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        GOMP_barrier();
    };
    const auto waited_by = [&](unsigned n_threads) {
        const int64_t before = ggml_cpu_barrier_wait();
        GOMP_parallel(work, nullptr, n_threads, 0);
        return ggml_cpu_barrier_wait() - before;
    };
    CHECK(waited_by(1) == 0);
    CHECK(waited_by(2) >= 19'000'000);
}

TEST_CASE("threads have teams of their own, which end with them") {
    std::atomic<int>         right = 0;
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; i++) {
        callers.emplace_back([&right] {
            for (int j = 0; j < 50; j++) {
                right += sums_are_right(3) ? 1 : 0;
            }
        });
    }
    for (std::thread & caller : callers) {
        caller.join();
    }
    CHECK(right == 200);
}

#ifndef __SANITIZE_THREAD__ // TSan sees nothing of libgomp, and starts no thread after a fork
namespace {

struct omp_functions {
    decltype(&GOMP_parallel)       parallel;
    decltype(&GOMP_barrier)        barrier;
    decltype(&GOMP_single_start)   starts_single;
    decltype(&omp_get_num_threads) n_threads;
    decltype(&omp_get_thread_num)  thread;
};

// A region that begins and ends as ggml's.
struct region {
    const omp_functions &         omp;
    std::vector<std::vector<int>> seen; // [thread]: what it is told, and what all have done behind each barrier
    std::atomic<int>              n_singles = 0;
    std::atomic<int>              n_steps   = 0;

    static void work(void * data) {
        region & self   = *static_cast<region *>(data);
        self.n_singles += self.omp.starts_single() ? 1 : 0;
        self.omp.barrier();
        const int          own_i = self.omp.thread();
        std::vector<int> & own   = self.seen[size_t(own_i)];
        own.insert(own.end(), { own_i, self.omp.n_threads(), self.n_singles });
        for (int step = 0; step < 3; step++) {
            self.n_steps++;
            self.omp.barrier();
            own.push_back(self.n_steps);
            self.omp.barrier();
        }
    }
};

std::vector<std::vector<int>> run_region(const omp_functions & omp, int n_threads) {
    region r = { omp, std::vector<std::vector<int>>(size_t(n_threads)), {}, {} };
    omp.parallel(region::work, &r, unsigned(n_threads), 0);
    return r.seen;
}

template <typename F>
F function_of(void * library, const char * name) {
    return reinterpret_cast<F>(dlsym(library, name));
}

} // namespace

TEST_CASE("threads of a region see what libgomp's would") {
    void * library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        MESSAGE("no libgomp is here");
        return;
    }
    const omp_functions ours   = { GOMP_parallel, GOMP_barrier, GOMP_single_start, omp_get_num_threads,
                                   omp_get_thread_num };
    const omp_functions theirs = {
        function_of<decltype(&GOMP_parallel)>(library, "GOMP_parallel"),
        function_of<decltype(&GOMP_barrier)>(library, "GOMP_barrier"),
        function_of<decltype(&GOMP_single_start)>(library, "GOMP_single_start"),
        function_of<decltype(&omp_get_num_threads)>(library, "omp_get_num_threads"),
        function_of<decltype(&omp_get_thread_num)>(library, "omp_get_thread_num"),
    };
    for (const int n_threads : { 1, 2, 5, 3 }) {
        const auto expected = run_region(theirs, n_threads);
        CHECK(expected[0] == std::vector<int>{ 0, n_threads, 1, n_threads, 2 * n_threads, 3 * n_threads });
        for (int i = 0; i < 200; i++) {
            REQUIRE(run_region(ours, n_threads) == expected);
        }
    }
}

TEST_CASE("a forked process has a team of its own") {
    REQUIRE(sums_are_right(3));
    const pid_t child = fork();
    if (child == 0) {
        _exit(sums_are_right(3) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}
#endif
