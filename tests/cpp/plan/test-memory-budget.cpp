// SPDX-License-Identifier: MIT
#include "plan/memory-budget.h"

#include "fixtures/pool-demands.h"

#include <algorithm>
#include <cstdlib>
#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

TEST_CASE("everything high: the whole budget is the high pool's") {
    CHECK(planned(with_pools(100 * MiB), one_tier()).n_slots == slot_counts{ 25, 0 });
    CHECK(planned(with_pools(100 * MiB), two_tiers()).n_slots == slot_counts{ 25, 0 });
    CHECK(planned(with_pools(103 * MiB), two_tiers()).n_slots == slot_counts{ 25, 0 });
}

TEST_CASE("the low pool exists only where the low tier can be chosen") {
    CHECK_FALSE(uses_low(with_pools(1, 1.0), two_tiers()));
    CHECK_FALSE(uses_low(with_pools(1, 0.5), one_tier()));
    CHECK(uses_low(with_pools(1, 0.5), two_tiers()));
}

TEST_CASE("without a share the low pool gets 1 - t1 slots for each of the high pool") {
    // t1 = 0: as many of each: 100 / (4 + 1)
    CHECK(planned(with_pools(100 * MiB, 0.0), two_tiers()).n_slots == slot_counts{ 20, 20 });
    // t1 = 0.5: 100 * 0.5 / (0.5 + 4) = 11.1 MiB of low slots, the rest high
    CHECK(planned(with_pools(100 * MiB, 0.5), two_tiers()).n_slots == slot_counts{ 22, 11 });
}

TEST_CASE("where the low tier is only for short memory, there is no low pool beside all high versions") {
    budget s       = with_pools(255 * MiB, 0.5);
    s.low_if_short = true;
    CHECK(planned(s, two_tiers()).n_slots[tier_id::low] > 0);
    s.pools = 256 * MiB;
    CHECK(planned(s, two_tiers()).n_slots == slot_counts{ 64, 0 });
    CHECK(planned(s, two_tiers(64, 1)).n_slots[tier_id::low] > 0);
}

TEST_CASE("a share is kept to, but leaves both pools what one token needs") {
    budget s    = with_pools(100 * MiB, 0.5);
    s.low_share = 0.25;
    CHECK(planned(s, two_tiers()).n_slots == slot_counts{ 18, 25 });
    s.low_share = 0.0;
    CHECK(planned(s, two_tiers()).n_slots == slot_counts{ 24, 4 });
    s.pools     = 40 * MiB;
    s.low_share = 1.0; // 40 - 4 * 4 = 24 MiB are left beside the smallest high pool
    CHECK(planned(s, two_tiers()).n_slots == slot_counts{ 4, 24 });
}

TEST_CASE("never more slots than experts") {
    CHECK(planned(with_pools(1000 * MiB), two_tiers()).n_slots == slot_counts{ 64, 0 });
    CHECK(planned(with_pools(100000 * MiB, 0.0), two_tiers()).n_slots == slot_counts{ 64, 64 });
    budget s    = with_pools(1000 * MiB, 0.5);
    s.low_share = 1.0;
    CHECK(planned(s, two_tiers()).n_slots == slot_counts{ 64, 64 });
}

TEST_CASE("a model with fewer experts than a token is said to use") {
    CHECK(planned(with_pools(8 * MiB), one_tier(2)).n_slots == slot_counts{ 2, 0 });
}

TEST_CASE("pools below the smallest are refused, and the smallest named works") {
    for (const double t1 : { 1.0, 0.5 }) {
        CAPTURE(t1);
        // 4 slots of 4 MiB, and 4 of 1 MiB where the low tier is used
        const uint64_t    smallest = (t1 < 1.0 ? 20 : 16) * MiB;
        const std::string message  = refused(with_pools(smallest - 1, t1), two_tiers());
        CHECK(message.find("the smallest that work are " + std::to_string(smallest) + " bytes") != std::string::npos);
        const counted_plan plan = planned(with_pools(smallest, t1), two_tiers());
        CHECK(plan.n_slots == slot_counts{ 4, t1 < 1.0 ? 4u : 0u });
    }
}

TEST_CASE("a byte is a budget, too") {
    CHECK(refused(with_pools(1), one_tier()).find("expert pools of 1 bytes are too small") == 0);
}

TEST_CASE("a memory budget leaves room for everything else") {
    const other_memory other = { 100 * MiB, 300 * MiB, 10 * MiB, 0, 0 };
    // 1000 MiB: less 410 MiB, less slack of 8 + 10 MiB, leaves 572 MiB: 143 slots, but there are 64 experts
    CHECK(planned(with_memory(1000 * MiB), one_tier(), other).n_slots[tier_id::high] == 64);
    // 600 MiB: less 410 MiB, less slack of 8 + 6 MiB, leaves 176 MiB
    CHECK(planned(with_memory(600 * MiB), one_tier(), other).n_slots[tier_id::high] == 44);
}

TEST_CASE("a memory budget below the smallest is refused, and the smallest named works") {
    const other_memory others[] = {
        {},
        { 100 * MiB, 300 * MiB, 10 * MiB, 0, 0 },
        { 50 * MiB, 20000 * MiB, 3 * MiB, 0, 0 },
    };
    for (const other_memory & other : others) {
        for (const double t1 : { 1.0, 0.0 }) {
            CAPTURE(other.model);
            CAPTURE(t1);
            const std::string message = refused(with_memory(MiB, t1), two_tiers(), other);
            const std::string words   = "the smallest that works is ";
            const size_t      at      = message.find(words);
            REQUIRE(at != std::string::npos);
            const uint64_t named = strtoull(message.c_str() + at + words.size(), nullptr, 10);

            const counted_plan plan = planned(with_memory(named * MiB, t1), two_tiers(), other);
            CHECK(plan.n_slots[tier_id::high] >= 4);
            // and it is not far above what is taken: 2 % and a few MiB
            const uint64_t sum = other.before + other.model + other.scratch + bytes_of(plan, two_tiers());
            CHECK(named * MiB >= sum);
            CHECK(named <= sum / MiB * 103 / 100 + 40);
        }
    }
}

TEST_CASE("a budget given for the pools alone overrides the one for the process") {
    budget s = with_pools(100 * MiB);
    s.memory = 1;
    CHECK(planned(s, one_tier()).n_slots[tier_id::high] == 25);
}

TEST_CASE("a bound above what the process may hold is refused with both numbers") {
    other_memory other = { 100 * MiB, 30 * MiB, 10 * MiB, 0, 0 };
    other.limit        = 600 * MiB;
    planned(with_memory(600 * MiB), one_tier(), other);
    std::string message = refused(with_memory(700 * MiB), one_tier(), other);
    CHECK(message.find("a limit of 700.0 MiB is above the 600.0 MiB") == 0);
    planned(with_pools(460 * MiB), one_tier(), other);
    message = refused(with_pools(461 * MiB), one_tier(), other);
    CHECK(message.find("a limit of 601.0 MiB for expert pools and all beside them is above the 600.0 MiB") == 0);

    other.device.name = "a GPU"; // the pools lie in a GPU's memory
    other.device.free = 9000 * MiB;
    other.device.host = one_tier();
    planned(with_pools(700 * MiB), one_tier(), other);
}

TEST_CASE("snapshots get a share of the room, and the least number its memory or an error") {
    other_memory other = { 100 * MiB, 300 * MiB, 10 * MiB, 0, 0 };
    other.snapshot     = 3 * MiB;
    const auto d       = one_tier(5000);
    budget     b       = with_memory(1000 * MiB); // a room of 572 MiB, see above
    b.snapshots        = 100;
    CHECK(planned(b, d, other).n_snapshots == 572 / 8 / 3);
    CHECK(planned(b, d, other).n_slots[tier_id::high] == (572 - 23 * 3) / 4);
    CHECK(planned(b, one_tier(), other).n_snapshots == 100); // beside all 64 experts
    CHECK(planned(b, one_tier(), other).n_slots[tier_id::high] == 64);

    other.snapshot = 45 * MiB; // the first four
    CHECK(planned(b, d, other).n_snapshots == 4);
    other.snapshot = 90 * MiB; // a third of the room
    CHECK(planned(b, d, other).n_snapshots == 2);
    b.snapshots = 1;
    CHECK(planned(b, d, other).n_snapshots == 1);

    b.snapshots = b.least_snapshots = 6;
    CHECK(planned(b, d, other).n_snapshots == 6);
    CHECK(planned(b, d, other).n_slots[tier_id::high] == (572 - 540) / 4);
    b.snapshots = b.least_snapshots = 7;
    CHECK(refused(b, d, other).find("7 context checkpoints of 90.0 MiB take 630.0 MiB, and 556.0 MiB are left") == 0);

    b           = with_memory(450 * MiB); // the smallest pools stay
    b.snapshots = 100;
    CHECK(planned(b, d, other).n_snapshots == 0);
    CHECK(planned(b, d, other).n_slots[tier_id::high] >= 4);
}

TEST_CASE("snapshots beside pools of a given size get what is free") {
    other_memory other = { 0, 0, 0, 0, 1000 * MiB };
    other.snapshot     = 100 * MiB;
    budget b           = with_pools(400 * MiB);
    b.snapshots        = 100;
    CHECK(planned(b, one_tier(), other).n_snapshots == (1000 - 256 - 400) / 100);
    CHECK(planned(b, one_tier(), other).n_slots[tier_id::high] == 64);
}

TEST_CASE("without a budget the pools get what is free, less what is still to come and a reserve") {
    // 5000 MiB available, less 100 MiB that the model will grow, 10 MiB of scratch, 10 % in reserve
    const other_memory other = { 200 * MiB, 700 * MiB, 10 * MiB, 800 * MiB, 5000 * MiB };
    const pool_demand  d     = one_tier(5000);
    CHECK(planned({}, d, other).n_slots[tier_id::high] == (5000 - 100 - 10 - 500) / 4);

    other_memory beside_display = other; // 2 GiB, or half of what is available
    beside_display.has_display  = true;
    CHECK(planned({}, d, beside_display).n_slots[tier_id::high] == (5000 - 100 - 10 - 2048) / 4);
    beside_display.available = 3000 * MiB;
    CHECK(planned({}, d, beside_display).n_slots[tier_id::high] == (3000 - 100 - 10 - 1500) / 4);
    beside_display.available = 22000 * MiB;
    CHECK(planned({}, d, beside_display).n_slots[tier_id::high] == (22000 - 100 - 10 - 2200) / 4);
    // little available: the reserve is 256 MiB
    const other_memory little = { 200 * MiB, 700 * MiB, 10 * MiB, 900 * MiB, 500 * MiB };
    CHECK(planned({}, d, little).n_slots[tier_id::high] == (500 - 10 - 256) / 4);

    // more resident than the model accounts for: nothing is still to come
    const other_memory more = { 200 * MiB, 700 * MiB, 10 * MiB, 2000 * MiB, 500 * MiB };
    CHECK(planned({}, d, more).n_slots[tier_id::high] == (500 - 10 - 256) / 4);
}

TEST_CASE("too little free memory is an error that says so") {
    const other_memory other   = { 0, 0, 0, 0, 260 * MiB };
    const std::string  message = refused({}, two_tiers(), other);
    CHECK(message.find(
              "not enough free memory for expert pools: 4.0 MiB are left, the smallest that work are 16.0 MiB") !=
          std::string::npos);
    CHECK(refused({}, two_tiers(), {}).find("not enough free memory") != std::string::npos);
}

TEST_CASE("any budget that is accepted is kept to") {
    for (uint64_t mib = 20; mib < 400; mib += 7) {
        for (const double t1 : { 0.0, 0.3, 0.7, 1.0 }) {
            CAPTURE(mib);
            CAPTURE(t1);
            const counted_plan plan = planned(with_pools(mib * MiB, t1), two_tiers());
            CHECK(bytes_of(plan, two_tiers()) <= mib * MiB);
            CHECK(plan.n_slots[tier_id::high] >= 4);
            CHECK(plan.n_slots[tier_id::high] <= 64);
            CHECK((plan.n_slots[tier_id::low] >= 4 || t1 == 1.0));
        }
    }
}

//
// a high tier that lacks experts
//

TEST_CASE("absent high versions take no slots, and their experts need the low pool") {
    const pool_demand half = two_tiers(64, 32);
    CHECK(uses_low(with_pools(1), half));
    // 32 uses of 4 MiB for 32 of 1 MiB: a fifth of the bytes are low
    CHECK(planned(with_pools(100 * MiB), half).n_slots == slot_counts{ 20, 20 });
    CHECK(planned(with_pools(128 * MiB), half).n_slots == slot_counts{ 25, 25 });
    // as if a use in two were low, of those with a high version
    CHECK(planned(with_pools(100 * MiB, 0.5), half).n_slots == slot_counts{ 16, 33 });
    // low versions get the room that the high ones leave
    CHECK(planned(with_pools(180 * MiB), half).n_slots == slot_counts{ 32, 52 });
    CHECK(planned(with_pools(1000 * MiB), half).n_slots == slot_counts{ 32, 64 });
}

TEST_CASE("the smallest pools hold what a token can use of each tier") {
    CHECK(refused(with_pools(20 * MiB - 1), two_tiers(64, 32)).find("the smallest that work are 20971520 bytes") !=
          std::string::npos);
    CHECK(planned(with_pools(20 * MiB), two_tiers(64, 32)).n_slots == slot_counts{ 4, 4 });
    CHECK(planned(with_pools(12 * MiB), two_tiers(64, 62)).n_slots == slot_counts{ 2, 4 });
    CHECK(planned(with_pools(4 * MiB), two_tiers(64, 64)).n_slots ==
          slot_counts{ 0, 4 }); // a device's plan among several
    for (uint64_t mib = 20; mib < 400; mib++) {
        for (const uint32_t n_absent : { 1u, 32u, 60u, 63u }) {
            const counted_plan plan = planned(with_pools(mib * MiB), two_tiers(64, n_absent));
            CHECK(bytes_of(plan, two_tiers()) <= mib * MiB);
            CHECK(plan.n_slots[tier_id::high] <= 64 - n_absent);
            CHECK(plan.n_slots[tier_id::low] >= 4);
        }
    }
}

TEST_CASE("a calibrated share of the low pool is raised where the high versions leave room") {
    budget b    = with_pools(180 * MiB);
    b.low_share = 0.1;
    CHECK(planned(b, two_tiers(64, 32)).n_slots == slot_counts{ 32, 52 });
    CHECK(planned(b, two_tiers()).n_slots == slot_counts{ 45, 0 });
    b           = with_pools(300 * MiB, 0.5); // all high versions take 256 of them
    b.low_share = 0.1;
    CHECK(planned(b, two_tiers()).n_slots == slot_counts{ 64, 30 });
}

//
// slots of several sizes
//

TEST_CASE("layers whose experts are nearly as large share a class, from the largest on") {
    CHECK(classes_of({ 100, 100, 100 }, 100, 1) == std::vector<uint32_t>{ 0, 0, 0 });
    CHECK(classes_of({ 87, 100, 87, 99 }, 100, 1) == std::vector<uint32_t>{ 1, 0, 1, 0 });
    CHECK(classes_of({ 95, 100, 94, 50, 0, 0 }, 100, 1) == std::vector<uint32_t>{ 0, 0, 1, 2, 3, 3 });
    CHECK(classes_of({ 0, 0 }, 100, 1) == std::vector<uint32_t>{ 0, 0 });
    CHECK(classes_of({}, 100, 1).empty());
    CHECK(classes_of({ 50, 100, 20 }, 8, 2) == std::vector<uint32_t>{ 1, 0, 2 });
    CHECK(classes_of({ 50, 100, 20 }, 8, 3) == std::vector<uint32_t>{ 0, 0, 0 }); // 9 of 24 would be the least
}

TEST_CASE("each class gets the least, and the same share of its other experts") {
    const slot_classes classes = { { 10, 16, 1 }, { 6, 48, 3 } };
    CHECK(slots_in(classes, 4, 0) == slot_numbers{ 4, 4 });
    CHECK(slots_in(classes, 4, 64 + 120 / 2 + 264 / 2) == slot_numbers{ 4 + 6, 4 + 22 });
    CHECK(slots_in(classes, 4, 448) == slot_numbers{ 16, 48 });
    CHECK(slots_in({ { 5, 0, 1 }, { 4, 2, 1 } }, 4, 100) == slot_numbers{ 0, 2 });
    CHECK(slots_in({}, 4, 100).empty());
}

TEST_CASE("slots of several sizes keep to any budget, and leave less than one of each size") {
    pool_demand d;
    d.n_used                 = 3;
    d.classes[tier_id::high] = { { 100, 29, 2 }, { 87, 16, 1 }, { 61, 32, 2 } };
    d.classes[tier_id::low]  = { { 50, 77, 5 } };
    const uint64_t smallest  = 3 * (100 + 87 + 61);
    CHECK(refused(with_pools(smallest - 1), d).find("the smallest that work are 744 bytes") != std::string::npos);
    for (const double t1 : { 1.0, 0.5 }) {
        for (uint64_t bytes = smallest + 150; bytes < 11000; bytes += 7) {
            pool_plan plan;
            REQUIRE(plan_pools(with_pools(bytes, t1), d, {}, plan).ok());
            const uint64_t high = d.bytes(tier_id::high, plan.n_slots[tier_id::high]);
            const uint64_t low  = d.bytes(tier_id::low, plan.n_slots[tier_id::low]);
            CHECK(high + low <= bytes);
            CHECK((high + low + 100 + 87 + 61 > bytes || plan.n_slots[tier_id::high] == d.all(tier_id::high)));
            CHECK(*std::min_element(plan.n_slots[tier_id::high].begin(), plan.n_slots[tier_id::high].end()) >= 3);
        }
    }
}
