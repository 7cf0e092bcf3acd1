// SPDX-License-Identifier: MIT
// HOBBIT's Fig. 17a; docs/results/predicted-by-routers.md has the command.
#include "fixtures/router-tensors.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <doctest/doctest.h>
#include <utility>
#include <vector>

using namespace hobbit;

TEST_CASE("microseconds of routers at once and one after the other" * doctest::skip()) {
    const cpu_backend cpu;
    for (const auto & [width, n_experts] : { std::pair<int, int>{ 4096, 8 }, { 4096, 16 }, { 2048, 128 } }) {
        const auto        made = router_predictor(experts(std::vector<uint32_t>(5, uint32_t(n_experts))));
        predictor &       p    = *made;
        const host_tensor weight(grid(size_t(width * n_experts), 1 / 64.0f, 0.5f, 1), width, n_experts);
        const host_tensor input(grid(size_t(width), 1 / 8.0f, 1.0f, 2), width);
        for (uint32_t layer = 0; layer < 5; layer++) {
            REQUIRE(p.set_router(layer_id(layer), { weight.tensor, nullptr, nullptr, {}, nullptr, 2 }).ok());
        }
        for (uint32_t n_ahead = 1; n_ahead <= 4; n_ahead++) {
            double least[2] = { INFINITY, INFINITY };
            for (int i = 0; i < 400; i++) {
                const bool                 at_once = i % 2 == 0;
                std::vector<layer_routing> predictions;
                const auto                 begin = std::chrono::steady_clock::now();
                for (uint32_t layer = 0; layer < (at_once ? 1 : n_ahead); layer++) {
                    REQUIRE(predict(p, cpu, input.tensor, layer_id(layer), at_once ? n_ahead : 1, 2, predictions).ok());
                }
                const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
                least[i % 2]                                         = std::min(least[i % 2], took.count());
            }
            std::printf("%d x %d, %u layers: %.1f at once, %.1f one after the other\n", n_experts, width, n_ahead,
                        least[0], least[1]);
        }
    }
}
