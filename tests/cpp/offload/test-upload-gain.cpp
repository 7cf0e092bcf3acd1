// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <vector>

using namespace hobbit;

static expert_tier expert(uint32_t number) {
    return { { 0, number }, tier_id::high };
}

// The gain of 20 uploads, the first ones with these uses of newcomer and victim.
static double gain_of(int uses, int victim_uses) {
    upload_gain gain;
    for (uint32_t i = 0; i < 20; i++) {
        gain.replaced(expert(2 * i), expert(2 * i + 1));
        for (int n = 0; n < uses; n++) {
            gain.used(expert(2 * i));
        }
        for (int n = 0; n < victim_uses; n++) {
            gain.used(expert(2 * i + 1));
        }
    }
    return gain.further_hits();
}

TEST_CASE("an upload gains the newcomer's uses less the victim's") {
    CHECK(gain_of(3, 0) == doctest::Approx(3.0).epsilon(0.05));
    CHECK(gain_of(3, 2) == doctest::Approx(1.0).epsilon(0.05));
    CHECK(gain_of(2, 3) == 0.0);
}

TEST_CASE("few uploads prove nothing") {
    upload_gain gain;
    for (uint32_t i = 0; i < 15; i++) {
        gain.replaced(expert(2 * i), expert(2 * i + 1));
        gain.used(expert(2 * i));
    }
    CHECK(gain.further_hits() == 0.0);
    gain.replaced(expert(100), expert(101));
    gain.replaced(expert(102), expert(103));
    CHECK(gain.further_hits() > 0.5);
}

TEST_CASE("a pair ends when the newcomer is evicted, and when the victim comes back") {
    upload_gain gain;
    for (uint32_t i = 0; i < 20; i++) {
        gain.replaced(expert(1), expert(0));
        gain.replaced(expert(2), expert(1)); // 1 is no newcomer any more
        gain.used(expert(0));
        gain.replaced(expert(0), expert(3)); // 0 was nobody's victim any more
        gain.replaced(expert(1), expert(2)); // nor is 1 now
        gain.replaced(expert(3), expert(1));
        gain.used(expert(2));
        gain.replaced(expert(2), expert(0)); // and 2 is no victim
        gain.replaced(expert(0), expert(2));
    }
    CHECK(gain.further_hits() == 0.0);
}

TEST_CASE("where any expert may be the next one, an upload gains nothing") {
    upload_gain           gain;
    std::mt19937          random(3);
    std::vector<uint32_t> pool;
    for (uint32_t e = 0; e < 50; e++) {
        pool.push_back(e);
    }
    for (int i = 0; i < 5000; i++) {
        const uint32_t e = uint32_t(random() % 100);
        gain.used(expert(e));
        if (std::find(pool.begin(), pool.end(), e) == pool.end()) {
            uint32_t & slot = pool[random() % pool.size()];
            gain.replaced(expert(e), expert(slot));
            slot = e;
        }
    }
    CHECK(gain.further_hits() < 0.2);
}
