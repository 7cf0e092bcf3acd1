// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

static std::unique_ptr<predictor> make(const std::string & name, const std::vector<uint32_t> & n_experts) {
    predictor_options options;
    options.name      = name;
    options.n_experts = n_experts;
    return registered_predictor::make(options);
}

TEST_CASE("predictors are made by name") {
    const std::vector<std::string> names = registered_predictor::names();
    for (const std::string & name : names) {
        CHECK(make(name, { 4, 4 }));
    }
    CHECK_FALSE(make("none", { 4, 4 }));
    CHECK(std::count(names.begin(), names.end(), predictor_options().name) == 1);
}

TEST_CASE("repeat names what each layer chose for the previous tokens") {
    const auto                 p = make("repeat", { 8, 8, 8 });
    std::vector<layer_routing> predictions;
    const auto                 run = [&](const layer_routing & routing, uint32_t n_ahead) {
        p->on_routing(routing);
        REQUIRE(p->predict(routing, n_ahead, nullptr, nullptr, predictions).ok());
        return predictions.size();
    };
    CHECK(p->accepts(nullptr));
    CHECK(p->knows(1));

    // a prompt of three tokens
    CHECK(run({ 0, 3, 2, { 0, 1, 2, 3, 4, 5 }, {} }, 2) == 0);
    CHECK(run({ 1, 3, 2, { 1, 0, 3, 2, 5, 4 }, { 1, 1, 1, 1, 0.6f, 0.2f } }, 2) == 0);

    // one token: the last row of the prompt, up to the layer that has not run
    CHECK(run({ 0, 1, 2, { 6, 7 }, {} }, 2) == 1);
    CHECK(predictions[0].layer == 1);
    CHECK(predictions[0].n_tokens == 1);
    CHECK(predictions[0].experts == std::vector<int32_t>{ 5, 4 });
    CHECK(predictions[0].weights[0] == doctest::Approx(0.75));
    CHECK(predictions[0].weights[1] == doctest::Approx(0.25));
    CHECK(run({ 1, 1, 2, { 2, 6 }, {} }, 2) == 0);
    CHECK(run({ 2, 1, 2, { 7, 3 }, {} }, 2) == 0); // the last layer

    // two tokens: the single row of the token before
    CHECK(run({ 0, 2, 2, { 0, 1, 6, 7 }, {} }, 1) == 1);
    CHECK(run({ 0, 2, 2, { 0, 1, 6, 7 }, {} }, 3) == 2);
    CHECK(predictions[0].n_tokens == 1);
    CHECK(predictions[0].experts == std::vector<int32_t>{ 2, 6 });
    CHECK(predictions[0].weights == std::vector<float>{ 0.5f, 0.5f });
    CHECK(predictions[1].layer == 2);
    CHECK(predictions[1].experts == std::vector<int32_t>{ 7, 3 });
}
