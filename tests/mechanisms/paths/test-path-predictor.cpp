// SPDX-License-Identifier: MIT
#include "fixtures/routes.h"
#include "predict/predictor.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <memory>
#include <vector>

using namespace hobbit;

using experts = std::vector<int32_t>;

namespace {

// One expert per token and layer where not said otherwise.
class paths {
  public:
    explicit paths(const std::vector<uint32_t> & n_experts, const char * name = "paths") :
        predictor_(registered_predictor::make(options(n_experts, name))) {}

    // Begins with what a calibration stores.
    paths(const char * name, const std::vector<int32_t> & stored, double bar = 0.0) {
        predictor_options of = options({ 4, 4, 4 }, name);
        of.paths             = stored;
        of.bar               = bar;
        predictor_           = registered_predictor::make(of);
    }

    void chose(layer_id layer, const experts & chosen, const std::vector<float> & weights = {}, int64_t n_tokens = 1) {
        running_ = { layer, n_tokens, int64_t(chosen.size()) / n_tokens, chosen, weights };
        predictor_->on_routing(running_);
    }

    // A token's choice in the layers from the first one on, n times.
    void ran(const std::vector<experts> & choices, int n = 1) {
        for (int i = 0; i < n; i++) {
            for (size_t layer = 0; layer < choices.size(); layer++) {
                chose(layer_id(layer), choices[layer]);
            }
        }
    }

    std::vector<layer_routing> predict(uint32_t n_ahead = 1) {
        std::vector<layer_routing> predictions;
        REQUIRE(predictor_->predict(running_, n_ahead, nullptr, nullptr, predictions).ok());
        return predictions;
    }

    experts predicted(uint32_t n_ahead = 1) { return predict(n_ahead).back().experts; }

    size_t bytes() const { return predictor_->bytes(); }

  private:
    static predictor_options options(const std::vector<uint32_t> & n_experts, const char * name = "paths") {
        predictor_options options;
        options.name      = name;
        options.n_experts = n_experts;
        return options;
    }

    std::unique_ptr<predictor> predictor_;
    layer_routing              running_;
};

} // namespace

TEST_CASE("the counts of a pair of layers, worked by hand") {
    paths p({ 4, 4 });
    p.ran({ { 0 }, { 1 } }, 3);
    p.ran({ { 0 }, { 2 } });
    p.ran({ { 3 }, { 3 } }, 4);

    // 3, 1 and 4 of 8 tokens chose the experts 1, 2 and 3; so did 3, 1 and 0 of the 4 tokens after expert 0. Half a
    // token with the frequencies joins these. So 1 and 2 lead, not the more frequent 3.
    p.chose(0, { 0, 1 }, { 6, 2 });
    const layer_routing next = p.predict()[0];
    CHECK(next.layer == 1);
    CHECK(next.n_tokens == 1);
    CHECK(next.experts == experts{ 1, 2 });
    const double after_0[] = { (3 + 0.5 * 3 / 8) / 4.5, (1 + 0.5 * 1 / 8) / 4.5 };
    const double after_1[] = { 3.0 / 8, 1.0 / 8 }; // it was never chosen, so that the frequencies stand in
    const double first     = 0.75 * after_0[0] + 0.25 * after_1[0];
    const double second    = 0.75 * after_0[1] + 0.25 * after_1[1];
    CHECK(next.weights[0] == doctest::Approx(first / (first + second)));
    CHECK(next.weights[1] == doctest::Approx(second / (first + second)));
}

TEST_CASE("as many experts are predicted as the layer uses") {
    predictor_options of;
    of.name                      = "paths";
    of.n_experts                 = { 4, 4 };
    of.n_used                    = { 1, 2 };
    const auto                 p = registered_predictor::make(of);
    std::vector<layer_routing> next;
    p->on_routing({ 0, 1, 1, { 3 }, {} });
    p->on_routing({ 1, 1, 2, { 2, 0 }, {} });
    p->on_routing({ 0, 1, 1, { 3 }, {} });
    REQUIRE(p->predict({ 0, 1, 1, { 3 }, {} }, 1, nullptr, nullptr, next).ok());
    REQUIRE(next.size() == 1);
    std::sort(next[0].experts.begin(), next[0].experts.end());
    CHECK(next[0].experts == experts{ 0, 2 });
}

TEST_CASE("a layer that has not run is not predicted") {
    paths p({ 4, 4, 4 });
    p.chose(0, { 0 });
    CHECK(p.predict(2).empty());
    p.chose(1, { 1 });
    p.chose(0, { 2 });
    CHECK(p.predict(2).size() == 1);
    CHECK(p.predicted() == experts{ 1 }); // whatever ran before
}

TEST_CASE("a cycle of routes is predicted any number of layers ahead") {
    for (const char * name : { "paths", "paths-exact" }) {
        paths      p({ 16, 16, 16, 16 }, name);
        const auto choice = [](int token, size_t layer) {
            const auto e = int32_t((size_t(token) * 2 + layer * 5) % 16);
            return experts{ e, (e + 1) % 16 };
        };
        for (int round = 0; round < 2; round++) {
            for (int token = 0; token < 8; token++) {
                for (size_t layer = 0; layer < 4; layer++) {
                    p.chose(layer_id(layer), choice(token, layer));
                    for (size_t ahead = 1; round > 0 && layer + ahead < 4; ahead++) {
                        const experts named = p.predicted(uint32_t(ahead));
                        for (const int32_t e : choice(token, layer + ahead)) {
                            CHECK(std::count(named.begin(), named.end(), e) == 1);
                        }
                    }
                }
            }
        }
    }
}

// How many of the last 40 choices are predicted that depend on the two layers before.
static int n_right(paths & p) {
    int right = 0;
    for (int token = 0; token < 80; token++) {
        const int32_t a = token / 2 % 2;
        const int32_t b = token % 2;
        p.chose(0, { a });
        p.chose(1, { b });
        right += token >= 40 && p.predicted() == experts{ a ^ b };
        p.chose(2, { a ^ b });
    }
    return right;
}

TEST_CASE("the dictionary tells apart what pairs cannot") {
    paths pairs({ 2, 2, 2 });
    paths exact({ 2, 2, 2 }, "paths-exact");
    CHECK(n_right(pairs) == 10);
    CHECK(n_right(exact) == 40);
}

TEST_CASE("a full dictionary takes no further keys") {
    paths p({ 500, 500, 500 }, "paths-exact");
    for (int32_t i = 0; i < 15000; i++) { // each key with its counts takes more than 600 bytes of 8 MiB
        p.ran({ { 2 + i % 400 }, { 2 + i / 400 }, { 2 } });
    }
    CHECK(n_right(p) < 40);
}

// The frequencies of the layers 1 and 2, what follows expert 0 of the layer 1, and what expert 0 after expert 2.
static const std::vector<int32_t> stored = {
    1,           200,
    0,           0,
    1,           256 * 1 + 200, //
    2,           200,
    0,           0,
    1,           256 * 3 + 200, //
    2,           8,
    1,           0,
    2,           0,
    256 * 1 + 6, 256 * 2 + 2, //
    2,           250,
    1,           1,
    1,           0,
    2,           256 * 2 + 250,
};

TEST_CASE("stored paths are predicted from the first token on") {
    const auto after = [](const char * name, int32_t first, int32_t second) {
        paths p(name, stored);
        p.chose(0, { first });
        CHECK(p.predicted() == experts{ 1 }); // by its frequency
        p.chose(1, { second });
        return p.predicted()[0];
    };
    for (const char * name : { "paths", "paths-exact" }) {
        CHECK(after(name, 1, 0) == 1);
        CHECK(after(name, 1, 3) == 3); // nothing is known of expert 3
    }
    CHECK(after("paths", 2, 0) == 1); // pairs know one layer alone
    CHECK(after("paths-exact", 2, 0) == 2);
}

TEST_CASE("stored paths give way to what the model chooses") {
    paths p("paths-exact", stored);
    p.ran({ { 2 }, { 0 }, { 3 } }, 40);
    p.chose(0, { 2 });
    p.chose(1, { 0 });
    CHECK(p.predicted() == experts{ 3 });
}

TEST_CASE("experts below the bar are not named") {
    const auto named = [](double bar) {
        paths p("paths", stored, bar);
        p.chose(0, { 1, 2 });
        p.chose(1, { 0, 3 }, { 3, 1 });
        return p.predict();
    };
    // expert 1: 6 of 8 tokens, with half a token more 0.71, times 3/4; expert 3: 0.06 times 3/4, and 1/4
    CHECK(named(0.0)[0].experts == experts{ 1, 3 });
    CHECK(named(0.28)[0].experts == experts{ 1, 3 });
    CHECK(named(0.31)[0].experts == experts{ 1 });
    CHECK(named(0.31)[0].n_used == 1);
    CHECK(named(0.31)[0].weights == std::vector<float>{ 1.0f });
    CHECK(named(0.6).empty());

    paths p("paths", stored, 0.5); // two tokens
    p.chose(1, { 3, 0 }, {}, 2);
    CHECK(p.predict()[0].n_tokens == 2);
    CHECK(p.predicted() == experts{ 3, 1 });
}

TEST_CASE("old counts give way to new ones") {
    paths p({ 2, 4 });
    p.ran({ { 0 }, { 1 } }, 2000);
    p.ran({ { 0 }, { 2 } }, 260);
    p.chose(0, { 0 });
    CHECK(p.predicted() == experts{ 2 });
}

TEST_CASE("each token of a batch is learnt and predicted alone") {
    paths p({ 4, 4, 4 });
    p.chose(0, { 0, 1, 2 }, {}, 3);
    p.chose(1, { 3, 2, 1 }, {}, 3);
    p.chose(2, { 0 }, {}, 1); // one of the three tokens, but not known which
    p.chose(0, { 2, 0 }, {}, 2);
    CHECK(p.predict()[0].n_tokens == 2);
    CHECK(p.predicted() == experts{ 1, 3 });

    p.chose(1, { 3, 2 }, {}, 2);
    CHECK(p.predicted() == experts{ 0, 0 }); // by its frequency
    p.chose(2, { 1, 1 }, {}, 2);
    p.chose(0, { 0 });
    p.chose(1, { 3 });
    CHECK(p.predicted() == experts{ 1 });
}

TEST_CASE("layers may differ in their number of experts") {
    paths p({ 8, 2, 4 });
    p.ran({ { 7, 6, 5 }, { 1, 0 }, { 3, 2, 1 } });
    p.chose(0, { 7, 6, 5 });
    const auto predictions = p.predict(2);
    REQUIRE(predictions.size() == 2);
    CHECK(predictions[0].experts == experts{ 0, 1 });
    CHECK(predictions[1].experts == experts{ 1, 2, 3 });
    constexpr size_t n_fixed = sizeof(std::vector<uint8_t>) + 8; // bytes of the counts behind an expert
    CHECK(p.bytes() == 8 * (2 + n_fixed) + 2 * (4 + n_fixed));
}

TEST_CASE("paths learn what follows what") {
    // layer 1 chooses what layer 0 chose: each of three experts is new once
    const hobbit_simulation_result r = run(two_layers("ABCABCABC", "ABCABCABC"), judged("paths", 0));
    CHECK(r.predictable == 9);
    CHECK(r.predicted_right == 6);
}
