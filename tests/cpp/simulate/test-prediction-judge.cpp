// SPDX-License-Identifier: MIT
#include "fixtures/routes.h"

#include <doctest/doctest.h>
#include <string>

TEST_CASE("repeat on four tokens, worked by hand") {
    // Layer 1 is predicted -, A, A, B and chooses A, A, B, A: one of four uses was predicted. Layer 1's slots: three
    // slots hold A X, A X, B A X, B A X before the third and fourth choice, so no prediction was missing.
    hobbit_simulation_result r = run(two_layers("XXXX", "AABA"), judged("repeat", 3));
    CHECK(r.predictable == 4);
    CHECK(r.predicted_right == 1);
    CHECK(r.predicted_missing == 0);
    CHECK(r.predicted_missing_right == 0);
    CHECK(r.hits_high == 5); // as without a predictor

    // One slot holds the expert of layer 0 when layer 1 is predicted: A, A and B are missing, and A is chosen once.
    r = run(two_layers("XXXX", "AABA"), judged("repeat", 1));
    CHECK(r.predicted_right == 1);
    CHECK(r.predicted_missing == 3);
    CHECK(r.predicted_missing_right == 1);
    CHECK(r.hits_high == 0);
}

TEST_CASE("tokens that are not counted teach the predictor and are not judged") {
    const hobbit_simulation_result r = run(two_layers("xxXX", "abBB"), judged("repeat", 0));
    CHECK(r.predictable == 2);
    CHECK(r.predicted_right == 2);
    CHECK(r.predicted_missing == 2);
    CHECK(r.predicted_missing_right == 2);
}

TEST_CASE("every layer but the first is predictable") {
    // layer 1 as above, layer 2 is predicted -, A, B, B and chooses A, B, B, B
    route_list routes;
    for (int32_t token = 0; token < 4; token++) {
        for (const int32_t layer : { 0, 1, 2 }) {
            const int32_t expert = layer == 0 ? 5 : (layer == 1 ? "AABA" : "ABBB")[token] - 'A';
            routes.push_back({ 0, token, layer, expert, 1.0f, true });
        }
    }
    hobbit_simulation options        = judged("repeat", 0);
    options.n_layers                 = 3;
    const hobbit_simulation_result r = run(routes, options);
    CHECK(r.predictable == 8);
    CHECK(r.predicted_right == 3); // 1 of layer 1, 2 of layer 2
}

TEST_CASE("without a predictor nothing is judged") {
    const hobbit_simulation_result r = run(two_layers("XX", "AA"), judged(nullptr, 2));
    CHECK(r.predictable + r.predicted_right + r.predicted_missing == 0);
}

TEST_CASE("a predictor that a trace cannot feed is refused") {
    const route_list  routes  = two_layers("X", "A");
    const std::string message = refusal(routes, judged("router", 1));
    CHECK(contains(message,
                   "no predictor 'router' runs on routes alone, which is all that a trace holds: choose one of "));
    CHECK(contains(message, "repeat"));
    CHECK(contains(refusal(routes, judged("oracle", 1)), "hobbit.predictor is 'oracle': choose one of "));
}
