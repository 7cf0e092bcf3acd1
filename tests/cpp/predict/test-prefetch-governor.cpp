// SPDX-License-Identifier: MIT
#include "predict/prefetcher.h"

#include <cmath>
#include <doctest/doctest.h>
#include <random>

using namespace hobbit;

using governor = prefetch_governor;

// A pass with or without prefetch, as the governor wants it. Times in any unit.
struct machine {
    governor g;
    double   with;
    double   without;
    uint64_t n_experts = 8;
    double   stall     = 0.5; // share of the time

    bool pass(double noise = 1.0) {
        const bool   on   = g.active();
        const double wall = (on ? with : without) * noise;
        g.end_pass({ on ? n_experts : 0, wall, stall * wall });
        return on;
    }

    // Returns how many of them prefetched.
    size_t passes(size_t n) {
        size_t n_on = 0;
        for (size_t i = 0; i < n; i++) {
            n_on += pass();
        }
        return n_on;
    }
};

TEST_CASE("a trial alternates, ends at a clear difference, and decides by it") {
    machine faster = { {}, 9.0, 10.0 };
    CHECK(faster.passes(governor::warm_up) == governor::warm_up);
    CHECK(faster.passes(2 * governor::min_pairs) == governor::min_pairs);
    CHECK(faster.passes(governor::hold) == governor::hold);
    CHECK(faster.passes(2 * governor::min_pairs) == governor::min_pairs); // the next trial
    CHECK(faster.g.n_pauses() == 0);

    machine slower = { {}, 10.0, 9.0 };
    slower.passes(governor::warm_up + 2 * governor::min_pairs);
    CHECK_FALSE(slower.g.is_on());
    CHECK(slower.g.n_pauses() == 1);
    CHECK(slower.passes(governor::min_pause) == 0);
}

TEST_CASE("pauses double while prefetch loses, and a gain forgets them") {
    machine m = { {}, 10.0, 9.0 };
    m.passes(governor::warm_up);
    for (const size_t pause : { 256, 512, 1024, 2048, 4096, 4096 }) {
        CHECK(m.passes(2 * governor::min_pairs) == governor::min_pairs);
        CHECK(m.passes(pause) == 0);
    }
    m.with = 8.0;
    m.passes(2 * governor::min_pairs);
    CHECK(m.g.is_on());
    CHECK(m.passes(governor::hold) == governor::hold);
    m.with = 10.0;
    m.passes(2 * governor::min_pairs);
    CHECK(m.passes(governor::min_pause) == 0);
    CHECK(m.g.active());
}

TEST_CASE("a small gain within the noise takes the longest trial and is decided by the mean") {
    machine m = { {}, 9.9, 10.0 };
    m.passes(governor::warm_up);
    size_t n_on = 0;
    for (size_t i = 0; i < governor::max_pairs; i++) { // +6 % and -8 % by turns
        n_on += m.pass(i % 2 ? 1.08 : 1.0) + m.pass(i % 2 ? 1.0 : 1.06);
    }
    CHECK(n_on == governor::max_pairs); // they alternated to the end
    CHECK(m.passes(governor::hold) == governor::hold);
}

TEST_CASE("a loss needs less evidence than a gain") {
    const auto after = [](double with, size_t n_pairs) {
        machine m = { {}, with, 10.0 };
        m.passes(governor::warm_up);
        for (size_t i = 0; i < n_pairs; i++) { // +-10 % by turns
            m.pass(i % 2 ? 1.1 : 0.9);
            m.pass();
        }
        return m.g;
    };
    CHECK(after(11.0, governor::min_pairs).n_pauses() == 1);
    CHECK(after(9.15, governor::min_pairs).active()); // the first pass of the next pair: the trial goes on
    CHECK(after(9.15, governor::min_pairs).n_pauses() == 0);
}

TEST_CASE("a tenth gained is seldom taken for a loss, and a tenth lost is found soon") {
    constexpr unsigned n_trials = 1000;
    unsigned           n_off    = 0;
    unsigned           n_found  = 0;
    size_t             n_passes = 0; // passes in the trials of a loss
    for (unsigned seed = 0; seed < n_trials; seed++) {
        const auto trial = [&](double with) {
            machine                    m = { {}, with, 10.0 };
            std::mt19937               random(seed);
            std::normal_distribution<> fresh(0.0, 0.2 * std::sqrt(1.0 - 0.3 * 0.3));
            double                     noise = 0.0; // a pair has a fifth, which lasts a little
            size_t                     n     = 0;
            m.passes(governor::warm_up);
            for (; n < 2 * governor::max_pairs && m.g.n_pauses() == 0; n += 2) {
                noise = 0.3 * noise + fresh(random);
                m.pass(std::exp(noise));
                m.pass();
            }
            n_passes += with > 10.0 ? n : 0;
            return m.g.is_on();
        };
        n_off   += !trial(10.0 / 1.1);
        n_found += !trial(10.0 * 1.1);
    }
    CHECK(n_off < n_trials / 20);
    CHECK(n_found > n_trials * 19 / 20);
    CHECK(n_passes < 2 * 20 * n_trials);
}

TEST_CASE("a trial is lost early if there is hardly a wait that prefetch could save") {
    machine m = { {}, 9.0, 10.0 };
    m.stall   = 0.9 * governor::min_stall;
    m.passes(governor::warm_up);
    CHECK(m.passes(2 * governor::stall_pairs) == governor::stall_pairs);
    CHECK(m.g.n_pauses() == 1);
    CHECK(m.passes(governor::min_pause) == 0);
    m.stall = 1.1 * governor::min_stall;
    m.passes(2 * governor::min_pairs);
    CHECK(m.g.is_on());
}

TEST_CASE("a gain is found in noise of a third of it") {
    size_t n_right = 0;
    for (unsigned seed = 0; seed < 100; seed++) {
        machine m = { {}, 9.0, 10.0 };
        m.passes(governor::warm_up);
        std::mt19937                     random(seed);
        std::uniform_real_distribution<> noise(0.9, 1.1);
        for (size_t i = 0; i < 2 * governor::max_pairs; i++) {
            m.pass(noise(random));
        }
        n_right += m.g.is_on();
    }
    CHECK(n_right == 100);
}

TEST_CASE("prefetch with nothing to fetch, or without times, stays on") {
    machine idle = { {}, 10.0, 9.0, 0 };
    idle.passes(governor::warm_up + 2 * governor::max_pairs);
    CHECK(idle.g.is_on());
    CHECK(idle.passes(governor::hold) == governor::hold);
    machine untimed = { {}, 0.0, 0.0 };
    untimed.passes(governor::warm_up + 2 * governor::max_pairs);
    CHECK(untimed.passes(governor::hold) == governor::hold);
    CHECK(untimed.g.n_pauses() == 0);
}
