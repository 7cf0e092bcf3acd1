// SPDX-License-Identifier: MIT
#include "io/loader.h"

#include <doctest/doctest.h>

using namespace hobbit;
using namespace std::chrono_literals;

TEST_CASE("time in which nobody asked counts for a second") {
    awake_clock::time_point real;
    awake_clock             clock([&] { return real; });
    const auto              start  = clock.now();
    real                          += 900ms;
    CHECK(clock.now() - start == 900ms);
    real += 1s;
    CHECK(clock.now() - start == 1900ms);
    real += 24h;
    CHECK(clock.now() - start == 2900ms);
    CHECK(clock.now() - start == 2900ms);
    for (int i = 0; i < 60; i++) {
        real += 1100ms; // a busy machine wakes waiters late
        clock.now();
    }
    CHECK(clock.now() - start == 62900ms);
}
