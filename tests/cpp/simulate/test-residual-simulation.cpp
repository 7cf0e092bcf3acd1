// SPDX-License-Identifier: MIT
//
// Routes replayed with a high tier that is a residual.
#include "fixtures/routes.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <string>

using namespace hobbit;

// Residuals of 4 bits on low versions of 4 bits.
static hobbit_simulation residual(uint32_t slots_high, uint32_t slots_low) {
    hobbit_simulation o = mixed(slots_high, slots_low);
    o.residual          = 1;
    o.bits_high         = 4.0;
    return o;
}

TEST_CASE("complete tiers load what they miss") {
    const hobbit_simulation_result r = run(ranked({ { 0, 1, 2 }, { 1, 0, 2 }, { 3, 4, 1 } }), mixed(1, 2));
    CHECK(r.loads_high == r.misses_high);
    CHECK(r.loads_low == r.misses_low);
}

TEST_CASE("a high expert is loaded in two terms, an upgrade in one, and a resident residual serves for nothing") {
    // first token: both terms of 0, the low version of 1
    hobbit_simulation_result r = run(ranked({ { 0, 1, 2 } }), residual(4, 4));
    CHECK(r.misses_high == 1);
    CHECK(r.misses_low == 1);
    CHECK(r.loads_high == 1);
    CHECK(r.loads_low == 2);
    CHECK(r.penalty == 1.5); // penalties of 8 bits
    // second token: 1 is upgraded, 0, worth low, is there in high
    r = run(ranked({ { 0, 1, 2 }, { 1, 0, 2 } }), residual(4, 4));
    CHECK(r.misses_high == 2);
    CHECK(r.hits_high == 1);
    CHECK(r.loads_high == 2);
    CHECK(r.loads_low == 2);
    CHECK(r.penalty == 2.0);
}

TEST_CASE("a residual goes with its low version, and alone under pressure of its own pool") {
    // 0 is high, 1 low; then 3 and 4 take both low slots: 0 is gone altogether
    hobbit_simulation_result r = run(ranked({ { 0, 1, 2 }, { 3, 4, 2 }, { 0, 1, 2 } }), residual(2, 2));
    CHECK(r.hits_high + r.hits_low == 0);
    CHECK(r.loads_high == 3);
    CHECK(r.loads_low == 6);
    // room for all low versions, but for one residual: 0 is upgraded again
    r = run(ranked({ { 0, 1, 2 }, { 3, 4, 2 }, { 0, 1, 2 } }), residual(1, 8));
    CHECK(r.loads_high == 3);
    CHECK(r.loads_low == 4);
    CHECK(r.misses_high == 3);
    CHECK(r.hits_low == 1);
}

TEST_CASE("everything high: two terms each, in pools of the same size as one") {
    hobbit_simulation one = options("lru", 1, 26, 1, 3);
    hobbit_simulation two = one;
    two.residual          = 1;
    two.slots_low         = 3;
    two.bits_high = two.bits_low = 8.0;
    std::mt19937 rng(6);
    for (int i = 0; i < 50; i++) {
        std::string text;
        for (int token = 0; token < 60; token++) {
            text += char('A' + std::min<int>(int(rng() % 9), int(rng() % 9)));
        }
        const hobbit_simulation_result a = run(letters(text), one);
        const hobbit_simulation_result b = run(letters(text), two);
        CHECK(a.hits_high == b.hits_high);
        CHECK(b.loads_high == a.misses_high);
        CHECK(b.loads_low == a.misses_high);
        CHECK(a.penalty == b.penalty);
    }
}
