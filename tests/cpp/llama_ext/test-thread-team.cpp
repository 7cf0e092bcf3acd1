// SPDX-License-Identifier: MIT
#include "../../llama_ext/cpu/thread-team.cpp" // its functions are hidden

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
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

#ifndef __SANITIZE_THREAD__ // TSan starts no thread after a fork
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
