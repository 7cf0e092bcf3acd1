// SPDX-License-Identifier: MIT
#include "offload/placement.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>

using namespace hobbit;

static constexpr computed_by DEVICE = computed_by::device;
static constexpr computed_by CPU    = computed_by::cpu;
static constexpr computed_by SPLIT  = computed_by::split;

static size_t count(const placed_experts & placed, computed_by by) {
    return size_t(std::count(placed.begin(), placed.end(), by));
}

// Now and later.
static double seconds_of(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                         const placed_experts & placed) {
    return layer_seconds(costs, work, placed) + bypass_seconds(costs, work, placed);
}

// Of all ways to share what is missing, with at most so many experts split.
static double brute_force(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                          size_t most_split) {
    double         best = -1.0;
    placed_experts placed(work.size(), DEVICE);
    const auto     try_from = [&](size_t i, const auto & self) -> void {
        if (i == work.size()) {
            const double seconds = seconds_of(costs, work, placed);
            best                 = best < 0.0 || seconds < best ? seconds : best;
            return;
        }
        for (const computed_by by : { DEVICE, CPU, SPLIT }) {
            const bool can_split = costs[work[i].kind].can_split() && count(placed, SPLIT) < most_split;
            if (by == DEVICE || (!work[i].is_present && (by == CPU || can_split))) {
                placed[i] = by;
                self(i + 1, self);
            }
            placed[i] = DEVICE;
        }
    };
    try_from(0, try_from);
    return best;
}

TEST_CASE("the placement is the best of all") {
    std::mt19937 random(1);
    const auto   uniform = [&](double least, double most) {
        return least + (most - least) * double(random() % 1000) / 1000.0;
    };
    size_t n_shared = 0;
    size_t n_split  = 0;
    for (int i = 0; i < 4500; i++) {
        CAPTURE(i);
        std::vector<expert_costs> costs;
        const size_t              n_kinds = 1 + random() % 4;
        for (size_t k = 0; k < n_kinds; k++) {
            const double device = random() % 3 == 0 ? uniform(0, 20) : uniform(0, 1); // may be the slowest of all
            const double down   = random() % 4 == 0 ? 0.0 : uniform(0, 1);
            const double bypass = i % 3 == 0 ? uniform(0, 5) : 0.0;
            costs.push_back({ uniform(0, 5), uniform(0, 2), device, uniform(0, 10), down, bypass });
        }
        std::vector<expert_work> work;
        const size_t             n_experts = random() % 9;
        for (size_t e = 0; e < n_experts; e++) {
            const uint32_t n_tokens = 1 + (i % 2 ? 0 : uint32_t(random() % 20));
            work.push_back({ uint32_t(random() % n_kinds), n_tokens, random() % 4 == 0 });
        }
        for (const size_t most_split : { 0, 1 }) {
            const placed_experts placed = place_experts(costs, work, most_split > 0);
            REQUIRE(placed.size() == work.size());
            for (size_t e = 0; e < work.size(); e++) {
                CHECK((placed[e] == DEVICE || !work[e].is_present));
            }
            CHECK(count(placed, SPLIT) <= most_split);
            CHECK(seconds_of(costs, work, placed) == doctest::Approx(brute_force(costs, work, most_split)));
            n_shared += count(placed, CPU) > 0 && count(placed, CPU) < work.size();
            n_split  += count(placed, SPLIT);
        }
    }
    CHECK(n_shared > 2000); // both ends are not all there is
    CHECK(n_split > 500);
}

TEST_CASE("a layer takes what the slowest of CPU, device and link takes") {
    const std::vector<expert_costs> costs = { { 1.0, 0.5, 0.25, 4.0 }, { 2.0, 1.0, 0.5, 8.0 } };
    const std::vector<expert_work>  work  = { { 0, 3, true }, { 0, 2, false }, { 1, 4, false }, { 1, 1, false } };
    CHECK(layer_seconds(costs, work, { DEVICE, CPU, CPU, CPU }) == 2.0 + 6.0 + 3.0);
    CHECK(layer_seconds(costs, work, { DEVICE, CPU, DEVICE, DEVICE }) == 16.0 + 0.5);
    CHECK(layer_seconds(costs, work, { DEVICE, DEVICE, CPU, DEVICE }) == 12.0 + 0.5);
    CHECK(layer_seconds({ { 0.0, 0.0, 5.0, 1.0 } }, { { 0, 1, true }, { 0, 1, false } }, { DEVICE, DEVICE }) == 10.0);
}

TEST_CASE("of an expert that is split the CPU has all but the last product") {
    const std::vector<expert_costs> fast_link = { { 1.0, 2.0, 0.5, 4.0, 0.25 } };
    const std::vector<expert_costs> slow_link = { { 1.0, 2.0, 0.5, 40.0, 0.25 } };
    const std::vector<expert_work>  work      = { { 0, 1, false }, { 0, 1, false } };
    CHECK(layer_seconds(fast_link, work, { SPLIT, CPU }) == 0.75 * 3.0 + 3.0 + 0.125);
    CHECK(layer_seconds(slow_link, work, { SPLIT, CPU }) == 10.0 + 0.125);
    CHECK(layer_seconds(slow_link, work, { SPLIT, DEVICE }) == 50.0 + 0.5);
}

TEST_CASE("an expert that is missing alone is split where CPU and link are about as fast") {
    const auto placed = [](double cpu, double transfer) {
        return place_experts({ { 0.0, cpu, 0.1, transfer, 1.0 / 3.0 } }, { { 0, 1, true }, { 0, 1, false } }, true);
    };
    CHECK(placed(3.0, 4.0) == placed_experts{ DEVICE, SPLIT });
    CHECK(placed(3.0, 10.0) == placed_experts{ DEVICE, CPU });
    CHECK(placed(10.0, 4.0) == placed_experts{ DEVICE, DEVICE });
}

TEST_CASE("what bypasses the device costs something later, for each expert") {
    const std::vector<expert_costs> costs = { { 0.0, 2.0, 0.0, 3.0, 0.5, 1.5 } };
    const std::vector<expert_work>  work  = { { 0, 1, true }, { 0, 1, false }, { 0, 1, false } };
    CHECK(bypass_seconds(costs, work, { DEVICE, DEVICE, DEVICE }) == 0.0);
    CHECK(bypass_seconds(costs, work, { DEVICE, CPU, SPLIT }) == 3.0);
    CHECK(place_experts(costs, { { 0, 1, false } }, false) == placed_experts{ DEVICE }); // 3 rather than 2 and 1.5
    CHECK(place_experts(costs, work, false) == placed_experts{ DEVICE, CPU, DEVICE });   // 3 + 1.5 rather than 6
}

TEST_CASE("experts with few tokens go to the CPU, those with many to the device") {
    const std::vector<expert_costs> costs = { { 0.5, 1.0, 0.1, 4.0 } };
    const std::vector<expert_work>  work  = { { 0, 50, false }, { 0, 1, false }, { 0, 2, false }, { 0, 40, false } };
    CHECK(place_experts(costs, work, true) == placed_experts{ DEVICE, CPU, CPU, DEVICE });
}

TEST_CASE("half of what is missing is computed while the other half is on its way") {
    const std::vector<expert_costs> costs = { { 0.0, 2.0, 0.0, 2.0 } };
    const std::vector<expert_work>  work(8, { 0, 1, false });
    CHECK(count(place_experts(costs, work, true), CPU) == 4);
}

TEST_CASE("what is present stays with the device, nothing is placed for nothing") {
    const std::vector<expert_costs> costs = { { 0.0, 0.001, 10.0, 10.0 } };
    CHECK(place_experts(costs, std::vector<expert_work>(3, { 0, 1, true }), true) == placed_experts(3, DEVICE));
    CHECK(place_experts(costs, {}, true).empty());
}

TEST_CASE("a prompt's 128 experts of three kinds are placed") {
    const std::vector<expert_costs> costs = { { 0.2, 0.10, 0.01, 1.0, 0.3 },
                                              { 0.1, 0.05, 0.01, 0.5, 0.3 },
                                              { 0.1, 0.07, 0.01, 0.7, 0.3 } };
    std::mt19937                    random(2);
    std::vector<expert_work>        work;
    for (uint32_t e = 0; e < 128; e++) {
        work.push_back({ e % 3, 1 + uint32_t(random() % 64), false });
    }
    const placed_experts placed  = place_experts(costs, work, true);
    const double         seconds = layer_seconds(costs, work, placed);
    for (size_t e = 0; e < work.size(); e++) { // no single change is better
        placed_experts other = placed;
        other[e]             = other[e] == CPU ? DEVICE : CPU;
        CHECK(layer_seconds(costs, work, other) >= doctest::Approx(seconds));
    }
}
