// SPDX-License-Identifier: MIT
#include "placement.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>

using namespace hobbit;

using choice = std::vector<bool>;

// Of all ways to share what is missing.
static double brute_force(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work) {
    double best = -1.0;
    for (uint32_t bits = 0; bits < 1u << work.size(); bits++) {
        choice on_cpu;
        bool   possible = true;
        for (size_t i = 0; i < work.size(); i++) {
            on_cpu.push_back(bits >> i & 1);
            possible = possible && !(on_cpu[i] && work[i].is_present);
        }
        const double seconds = layer_seconds(costs, work, on_cpu);
        best                 = possible && (best < 0.0 || seconds < best) ? seconds : best;
    }
    return best;
}

TEST_CASE("the placement is the best of all") {
    std::mt19937 random(1);
    const auto   uniform = [&](double least, double most) {
        return least + (most - least) * double(random() % 1000) / 1000.0;
    };
    size_t n_shared = 0;
    for (int i = 0; i < 3000; i++) {
        CAPTURE(i);
        std::vector<expert_costs> costs;
        const size_t              n_kinds = 1 + random() % 4;
        for (size_t k = 0; k < n_kinds; k++) {
            const double device = random() % 3 == 0 ? uniform(0, 20) : uniform(0, 1); // may be the slowest of all
            costs.push_back({ uniform(0, 5), uniform(0, 2), device, uniform(0, 10) });
        }
        std::vector<expert_work> work;
        const size_t             n_experts = random() % 11;
        for (size_t e = 0; e < n_experts; e++) {
            const uint32_t n_tokens = 1 + (i % 2 ? 0 : uint32_t(random() % 20));
            work.push_back({ uint32_t(random() % n_kinds), n_tokens, random() % 4 == 0 });
        }
        const choice on_cpu = place_experts(costs, work);
        REQUIRE(on_cpu.size() == work.size());
        for (size_t e = 0; e < work.size(); e++) {
            CHECK_FALSE((on_cpu[e] && work[e].is_present));
        }
        CHECK(layer_seconds(costs, work, on_cpu) == doctest::Approx(brute_force(costs, work)));
        const auto n_on_cpu  = size_t(std::count(on_cpu.begin(), on_cpu.end(), true));
        n_shared            += n_on_cpu > 0 && n_on_cpu < work.size();
    }
    CHECK(n_shared > 1000); // both ends are not all there is
}

TEST_CASE("a layer takes what the slowest of CPU, device and link takes") {
    const std::vector<expert_costs> costs = { { 1.0, 0.5, 0.25, 4.0 }, { 2.0, 1.0, 0.5, 8.0 } };
    const std::vector<expert_work>  work  = { { 0, 3, true }, { 0, 2, false }, { 1, 4, false }, { 1, 1, false } };
    CHECK(layer_seconds(costs, work, { false, true, true, true }) == 2.0 + 6.0 + 3.0);
    CHECK(layer_seconds(costs, work, { false, true, false, false }) == 16.0 + 0.5);
    CHECK(layer_seconds(costs, work, { false, false, true, false }) == 12.0 + 0.5);
    CHECK(layer_seconds({ { 0.0, 0.0, 5.0, 1.0 } }, { { 0, 1, true }, { 0, 1, false } }, { false, false }) == 10.0);
}

TEST_CASE("experts with few tokens go to the CPU, those with many to the device") {
    const std::vector<expert_costs> costs = { { 0.5, 1.0, 0.1, 4.0 } };
    const std::vector<expert_work>  work  = { { 0, 50, false }, { 0, 1, false }, { 0, 2, false }, { 0, 40, false } };
    CHECK(place_experts(costs, work) == choice{ false, true, true, false });
}

TEST_CASE("half of what is missing is computed while the other half is on its way") {
    const std::vector<expert_costs> costs = { { 0.0, 2.0, 0.0, 2.0 } };
    const std::vector<expert_work>  work(8, { 0, 1, false });
    const choice                    on_cpu = place_experts(costs, work);
    CHECK(std::count(on_cpu.begin(), on_cpu.end(), true) == 4);
}

TEST_CASE("what is present stays with the device, nothing is placed for nothing") {
    const std::vector<expert_costs> costs = { { 0.0, 0.001, 10.0, 10.0 } };
    CHECK(place_experts(costs, std::vector<expert_work>(3, { 0, 1, true })) == choice(3, false));
    CHECK(place_experts(costs, {}).empty());
}

TEST_CASE("a prompt's 128 experts of three kinds are placed") {
    const std::vector<expert_costs> costs = { { 0.2, 0.10, 0.01, 1.0 },
                                              { 0.1, 0.05, 0.01, 0.5 },
                                              { 0.1, 0.07, 0.01, 0.7 } };
    std::mt19937                    random(2);
    std::vector<expert_work>        work;
    for (uint32_t e = 0; e < 128; e++) {
        work.push_back({ e % 3, 1 + uint32_t(random() % 64), false });
    }
    const choice on_cpu  = place_experts(costs, work);
    const double seconds = layer_seconds(costs, work, on_cpu);
    for (size_t e = 0; e < work.size(); e++) { // no single change is better
        choice other = on_cpu;
        other[e]     = !other[e];
        CHECK(layer_seconds(costs, work, other) >= doctest::Approx(seconds));
    }
}
