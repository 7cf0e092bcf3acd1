// SPDX-License-Identifier: MIT
#include "plan/memory-budget.h"

#include "fixtures/pool-demands.h"

#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

//
// a device with memory of its own
//

// A device of 1000 MiB, with rows of 10 MiB; slots of host memory are larger than its own.
static other_memory with_device() {
    const pool_demand   host   = pools_of(64, { 5 * MiB, 2 * MiB });
    const device_memory device = { "GPU0", 1000 * MiB, 10 * MiB, host };
    return { 200 * MiB, 700 * MiB, 10 * MiB, 800 * MiB, 100 * MiB, device };
}

TEST_CASE("a device's pools get what it has free, less the rows and a reserve") {
    const pool_demand d = one_tier(5000);
    CHECK(planned({}, d, with_device()).n_slots[tier_id::high] == (1000 - 10 - 256) / 4);
    budget s;
    s.device_memory = 500 * MiB;
    CHECK(planned(s, d, with_device()).n_slots[tier_id::high] == (500 - 500 / 256 - 1 - 10) / 4);
    s.pools = 100 * MiB;
    CHECK(planned(s, d, with_device()).n_slots[tier_id::high] == 100 / 4);
}

TEST_CASE("device memory below the smallest is refused, and the smallest named works") {
    budget s;
    s.device_memory = MiB;
    CHECK(refused(s, two_tiers(), with_device()) ==
          "device memory of 1.0 MiB is too small: the smallest that works is 27 MiB");
    s.device_memory = 27 * MiB;
    CHECK(planned(s, two_tiers(), with_device()).n_slots[tier_id::high] == 4);

    other_memory full = with_device();
    full.device.free  = 270 * MiB;
    CHECK(refused({}, two_tiers(), full) ==
          "GPU0 has too little free memory for expert pools: 4.0 MiB are left, the smallest that work are 16.0 MiB; "
          "free some of it, use a smaller context, or leave the experts in host memory with hobbit.device CPU");
}

TEST_CASE("with a device a memory budget is for everything but the pools") {
    const uint64_t others = 200 + 700 + 10 + 8;
    CHECK(planned(with_memory(1000 * MiB), one_tier(), with_device()).n_slots[tier_id::high] == 64);
    const std::string message = refused(with_memory(others * MiB), one_tier(), with_device());
    CHECK(message.find("a memory budget of 918.0 MiB is too small") != std::string::npos);
    budget with_pools = with_memory(others * MiB);
    with_pools.pools  = 100 * MiB;
    CHECK(refused(with_pools, one_tier(), with_device()) == message);
}

TEST_CASE("host memory behind a device caches experts in what its budget leaves") {
    // 1100 MiB, less 11 MiB, less 918 MiB for everything else, leave 171 MiB
    CHECK(planned(with_memory(1100 * MiB), one_tier(), with_device()).n_host_slots == slot_counts{ 34, 0 });
    CHECK(planned(with_memory(9000 * MiB), one_tier(), with_device()).n_host_slots == slot_counts{ 64, 0 });
    CHECK(planned(with_memory(1100 * MiB, 0.0), two_tiers(), with_device()).n_host_slots == slot_counts{ 24, 24 });

    budget s        = with_memory(1100 * MiB);
    s.pools         = 100 * MiB; // pools of the device
    const auto plan = planned(s, one_tier(), with_device());
    CHECK(plan.n_slots[tier_id::high] == 25);
    CHECK(plan.n_host_slots[tier_id::high] == 34);
}

TEST_CASE("without a budget host memory behind a device caches experts in what is free") {
    other_memory other = with_device(); // 100 MiB of the model are still to come
    other.available    = 600 * MiB;
    CHECK(planned({}, one_tier(), other).n_host_slots == slot_counts{ (600 - 100 - 10 - 256) / 5, 0 });
    other.available = 100 * MiB;
    CHECK(planned({}, one_tier(), other).n_host_slots == slot_counts{ 0, 0 });
    other.available = (366 + 4 * 5) * MiB; // just a token's experts of a layer
    CHECK(planned({}, one_tier(), other).n_host_slots == slot_counts{ 4, 0 });
    other.available--;
    CHECK(planned({}, one_tier(), other).n_host_slots == slot_counts{ 0, 0 });
}

TEST_CASE("host memory with less room than a token's experts of a layer caches none") {
    const uint64_t others = 200 + 700 + 10 + 8;
    for (const uint64_t room : { 19, 21 }) {
        const uint64_t budget = (others + room) * MiB * 100 / 99 + 1;
        CHECK(planned(with_memory(budget), one_tier(), with_device()).n_host_slots[tier_id::high] ==
              (room < 20 ? 0 : 4));
    }
}

//
// several devices
//

// The demand of so many layers of 16 experts.
static device_share device_with(uint32_t n_layers) {
    return { one_tier(16 * n_layers), 10 * MiB };
}

static std::vector<budget> shared(const budget & s, const std::vector<device_share> & devices) {
    std::vector<budget> each;
    const status        result = share_bounds(s, devices, each);
    CHECK_MESSAGE(result.ok(), result.message());
    return each;
}

TEST_CASE("pools are shared by what the devices' layers take, each with the least that works") {
    // the least are 4 slots of 4 MiB each; all experts are 48 and 16 slots
    const std::vector<device_share> devices = { device_with(3), device_with(1) };
    const auto                      parts   = [&](uint64_t bytes) {
        const auto each = shared(with_pools(bytes), devices);
        return std::vector<uint64_t>{ each[0].pools, each[1].pools };
    };
    CHECK(parts(32 * MiB) == std::vector<uint64_t>{ 16 * MiB, 16 * MiB });
    CHECK(parts(64 * 4 * MiB) == std::vector<uint64_t>{ 48 * 4 * MiB, 16 * 4 * MiB }); // room for all
    CHECK(parts(36 * 4 * MiB) == std::vector<uint64_t>{ 26 * 4 * MiB, 10 * 4 * MiB }); // half of the rest
}

TEST_CASE("pools of several devices that are too small together name the smallest sum that works") {
    const std::vector<device_share> devices = { device_with(3), device_with(1) };
    std::vector<budget>             each;
    CHECK(share_bounds(with_pools(32 * MiB - 1), devices, each).message() ==
          "expert pools of 33554431 bytes are too small: the smallest that work are 33554432 bytes (32.0 MiB)");
    CHECK(share_bounds(with_pools(32 * MiB), devices, each).ok());
}

TEST_CASE("a low tier counts where it is used") {
    const std::vector<device_share> devices(2, { two_tiers(16), 10 * MiB });
    std::vector<budget>             each;
    CHECK(share_bounds(with_pools(32 * MiB), devices, each).ok());
    CHECK_FALSE(share_bounds(with_pools(40 * MiB - 1, 0.5), devices, each).ok());
    CHECK(shared(with_pools(40 * MiB, 0.5), devices)[1].pools == 20 * MiB);
}

TEST_CASE("absent high versions are no part of what a device's layers take") {
    const std::vector<device_share> devices = { { two_tiers(16, 8), 10 * MiB }, { two_tiers(16), 10 * MiB } };
    // beyond the least, which are 20 MiB, 16 low and 8 high versions take 28 MiB, and all of the other 60 MiB
    const auto each = shared(with_pools((40 + 88) * MiB, 0.5), devices);
    CHECK(each[0].pools == 48 * MiB);
    CHECK(each[1].pools == 80 * MiB);
}

TEST_CASE("device memory is shared in the same way, and each part works") {
    const std::vector<device_share> devices = { device_with(3), device_with(1) };
    budget                          s;
    std::vector<budget>             each;
    s.device_memory = 53 * MiB;
    CHECK(share_bounds(s, devices, each).message() ==
          "device memory of 53.0 MiB is too small: the smallest that works is 54 MiB"); // 27 of one device
    for (const uint64_t bytes : { 54, 200, 400 }) {
        CAPTURE(bytes);
        s.device_memory = bytes * MiB;
        each            = shared(s, devices);
        CHECK(each[0].device_memory + each[1].device_memory <= s.device_memory);
        CHECK(each[0].device_memory + each[1].device_memory > s.device_memory - MiB);
        for (size_t i = 0; i < 2; i++) {
            CHECK(planned(each[i], devices[i].demand, with_device()).n_slots[tier_id::high] >= 4);
        }
    }
    CHECK(planned(each[0], devices[0].demand, with_device()).n_slots[tier_id::high] == 48);
    CHECK(planned(each[1], devices[1].demand, with_device()).n_slots[tier_id::high] == 16);
    s.pools = 36 * 4 * MiB; // bounds the pools, whatever the device memory
    CHECK(shared(s, devices)[0].pools == 26 * 4 * MiB);
}

TEST_CASE("a device without layers gets nothing, and one device has the bounds as they are") {
    const auto each = shared(with_pools(64 * MiB), { device_with(0), device_with(1) });
    CHECK(each[0].pools == 0);
    CHECK(each[1].pools == 64 * MiB);
    CHECK(shared(with_pools(1), { device_with(1) })[0].pools == 1); // plan_pools refuses it
    CHECK(shared({}, { device_with(1), device_with(1) })[0].pools == 0);
    CHECK(shared({}, { device_with(1), device_with(1) })[1].device_memory == 0);

    // all of their experts are in the smallest pools
    const device_share small = { one_tier(4), 10 * MiB };
    CHECK(shared(with_pools(100 * MiB), { small, small })[1].pools == 16 * MiB);
}
