// SPDX-License-Identifier: MIT
#include "predict/given-predictor.h"

#include <doctest/doctest.h>

using namespace hobbit;

static std::vector<layer_routing> predict(const given_routing & given, layer_id layer, int64_t n_tokens,
                                          uint32_t n_ahead) {
    predictor_options options;
    options.name = "given";
    options.n_experts.assign(3, 8);
    options.given        = &given;
    const auto predictor = make_predictor(options);
    REQUIRE(predictor->knows(1));
    REQUIRE(predictor->accepts(nullptr));
    const layer_routing        running = { layer, n_tokens, 2, std::vector<int32_t>(size_t(2 * n_tokens)), {} };
    std::vector<layer_routing> predictions;
    REQUIRE(predictor->predict(running, n_ahead, nullptr, nullptr, predictions).ok());
    return predictions;
}

// Two layers ahead, two tokens, three layers, two experts: 10 * ahead + 2 * token + rank in layer 1, and so on.
static given_routing example() {
    given_routing given = { 2, 2, 2, {}, {} };
    for (int ahead = 1; ahead <= 2; ahead++) {
        for (int token = 0; token < 2; token++) {
            for (int layer = 0; layer < 3; layer++) {
                for (int rank = 0; rank < 2; rank++) {
                    given.experts.push_back(100 * ahead + 10 * layer + 2 * token + rank);
                    given.weights.push_back(rank == 0 ? 0.75f : 0.25f);
                }
            }
        }
    }
    return given;
}

TEST_CASE("what was said of a batch is predicted, by the distance of the layer") {
    const given_routing given       = example();
    const auto          predictions = predict(given, 0, 2, 4);
    REQUIRE(predictions.size() == 2);
    CHECK(predictions[0].layer == 1);
    CHECK(predictions[0].experts == std::vector<int32_t>{ 110, 111, 112, 113 });
    CHECK(predictions[0].weights == std::vector<float>{ 0.75f, 0.25f, 0.75f, 0.25f });
    CHECK(predictions[1].layer == 2);
    CHECK(predictions[1].experts == std::vector<int32_t>{ 220, 221, 222, 223 });
    CHECK(predict(given, 0, 2, 1).size() == 1);
    CHECK(predict(given, 1, 2, 4).size() == 1); // the last layer
    CHECK(predict(given, 2, 2, 4).empty());
}

TEST_CASE("of a layer with fewer tokens the last ones are meant, and more tokens are not known") {
    const given_routing given = example();
    CHECK(predict(given, 0, 1, 1).front().experts == std::vector<int32_t>{ 112, 113 });
    CHECK(predict(given, 0, 3, 1).empty());
    CHECK(predict({}, 0, 1, 1).empty());
}

TEST_CASE("without a caller that says anything, no layer is known") {
    predictor_options options;
    options.name = "given";
    options.n_experts.assign(3, 8);
    const auto predictor = make_predictor(options);
    CHECK_FALSE(predictor->knows(1));
    CHECK_FALSE(predictor->accepts(nullptr));
}
