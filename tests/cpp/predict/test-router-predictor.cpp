// SPDX-License-Identifier: MIT
#include "fixtures/router-tensors.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <numeric>
#include <set>
#include <vector>

using namespace hobbit;

static constexpr int64_t WIDTH = 64;

struct test_router {
    std::vector<float> weight; // [expert][width]
    std::vector<float> bias;
    std::vector<float> selection_bias;
    hobbit_gating      gating = HOBBIT_GATING_SOFTMAX;
    std::vector<float> gain;
    uint32_t           n_used = 0;

    explicit test_router(size_t n_experts, unsigned seed = 1) :
        weight(grid(n_experts * WIDTH, 1 / 64.0f, 0.5f, seed)) {}

    size_t n_experts() const { return weight.size() / WIDTH; }

    status set(predictor & p, layer_id layer) const {
        const host_tensor w(weight, WIDTH, int64_t(n_experts()));
        const host_tensor b(bias, int64_t(std::max<size_t>(bias.size(), 1)));
        const host_tensor s(selection_bias, int64_t(std::max<size_t>(selection_bias.size(), 1)));
        const host_tensor g(gain, int64_t(std::max<size_t>(gain.size(), 1)));
        return p.set_router(layer,
                            { w.tensor, bias.empty() ? nullptr : b.tensor, selection_bias.empty() ? nullptr : s.tensor,
                              gating, gain.empty() ? nullptr : g.tensor, n_used });
    }
};

struct choice {
    std::vector<int32_t> experts;
    std::vector<double>  weights;
};

static double probability(hobbit_gating gating, double x, double softmax_sum) {
    switch (gating) {
        case HOBBIT_GATING_SOFTMAX:       return std::exp(x) / softmax_sum;
        case HOBBIT_GATING_SIGMOID:       return 1.0 / (1.0 + std::exp(-x));
        case HOBBIT_GATING_SQRT_SOFTPLUS: return std::sqrt(std::log(1.0 + std::exp(x)));
    }
    return 0.0;
}

// In double precision, straight from the definition.
static choice reference(const test_router & r, const float * x, size_t k) {
    std::vector<double> outputs;
    double              softmax_sum = 0.0;
    for (size_t e = 0; e < r.n_experts(); e++) {
        const float * row = &r.weight[e * WIDTH];
        outputs.push_back(std::inner_product(x, x + WIDTH, row, 0.0) + (r.bias.empty() ? 0.0 : r.bias[e]));
        softmax_sum += std::exp(outputs.back());
    }
    std::vector<double> probabilities;
    std::vector<double> keys;
    for (size_t e = 0; e < r.n_experts(); e++) {
        probabilities.push_back(probability(r.gating, outputs[e], softmax_sum));
        keys.push_back(probabilities[e] + (r.selection_bias.empty() ? 0.0 : r.selection_bias[e]));
    }
    choice c;
    c.experts.resize(r.n_experts());
    std::iota(c.experts.begin(), c.experts.end(), 0);
    std::stable_sort(c.experts.begin(), c.experts.end(),
                     [&](int32_t a, int32_t b) { return keys[size_t(a)] > keys[size_t(b)]; });
    c.experts.resize(k);
    double sum = 0.0;
    for (const int32_t e : c.experts) {
        sum += probabilities[size_t(e)];
    }
    for (const int32_t e : c.experts) {
        c.weights.push_back(probabilities[size_t(e)] / sum);
    }
    return c;
}

static void check_token(const layer_routing & got, int64_t token, const choice & want) {
    REQUIRE(got.n_used == int64_t(want.experts.size()));
    for (size_t k = 0; k < want.experts.size(); k++) {
        const size_t i = size_t(token) * want.experts.size() + k;
        CHECK(got.experts[i] == want.experts[k]);
        CHECK(got.weights[i] == doctest::Approx(want.weights[k]).epsilon(1e-5));
    }
}

TEST_CASE("every gating with every bias predicts what a naive reference computes") {
    const auto        m = experts({ 16, 16 });
    const cpu_backend cpu;
    for (const hobbit_gating gating : { HOBBIT_GATING_SOFTMAX, HOBBIT_GATING_SIGMOID, HOBBIT_GATING_SQRT_SOFTPLUS }) {
        for (unsigned biases = 0; biases < 4; biases++) {
            CAPTURE(gating);
            CAPTURE(biases);
            test_router r(16, 7 + biases);
            r.gating         = gating;
            r.bias           = biases & 1 ? grid(16, 1 / 32.0f, 1.0f, 3) : std::vector<float>();
            r.selection_bias = biases & 2 ? grid(16, 1 / 32.0f, 0.5f, 4) : std::vector<float>();
            const auto  made = router_predictor(m);
            predictor & p    = *made;
            REQUIRE(r.set(p, 1).ok());

            constexpr int64_t          n_tokens = 20;
            const std::vector<float>   x        = grid(n_tokens * WIDTH, 1 / 8.0f, 1.0f, 11);
            const host_tensor          input(x, WIDTH, n_tokens);
            std::vector<layer_routing> predictions;
            REQUIRE(predict(p, cpu, input.tensor, 0, 1, 4, predictions).ok());
            REQUIRE(predictions.size() == 1);
            CHECK(predictions[0].layer == 1);
            CHECK(predictions[0].n_tokens == n_tokens);
            for (int64_t t = 0; t < n_tokens; t++) {
                check_token(predictions[0], t, reference(r, &x[size_t(t * WIDTH)], 4));
            }
        }
    }
}

TEST_CASE("worked by hand: the selection bias chooses, the weights are those without it") {
    const auto        m = experts({ 4, 4 });
    const cpu_backend cpu;
    test_router       r(4);
    r.gating = HOBBIT_GATING_SIGMOID;
    std::fill(r.weight.begin(), r.weight.end(), 0.0f);
    r.bias           = { 2.0f, 0.0f, -2.0f, 1.0f }; // probabilities 0.8808, 0.5, 0.1192, 0.7311
    r.selection_bias = { -0.5f, 0.0f, 0.5f, 0.0f }; // 0.3808, 0.5, 0.6192, 0.7311
    const auto  made = router_predictor(m);
    predictor & p    = *made;
    REQUIRE(r.set(p, 1).ok());
    const host_tensor          input(std::vector<float>(WIDTH, 1.0f), WIDTH);
    std::vector<layer_routing> predictions;
    REQUIRE(predict(p, cpu, input.tensor, 0, 1, 2, predictions).ok());
    CHECK(predictions[0].experts == std::vector<int32_t>{ 3, 2 });
    CHECK(predictions[0].weights[0] == doctest::Approx(0.7311 / (0.7311 + 0.1192)).epsilon(1e-3));
    CHECK(predictions[0].weights[1] == doctest::Approx(0.1192 / (0.7311 + 0.1192)).epsilon(1e-3));
}

TEST_CASE("of equal experts the first are taken, whatever the gating") {
    const auto        m = experts({ 8, 8 });
    const cpu_backend cpu;
    for (const hobbit_gating gating : { HOBBIT_GATING_SOFTMAX, HOBBIT_GATING_SIGMOID, HOBBIT_GATING_SQRT_SOFTPLUS }) {
        test_router r(8);
        r.gating = gating;
        std::fill(r.weight.begin(), r.weight.end(), 0.25f);
        std::fill(r.weight.begin() + 5 * WIDTH, r.weight.begin() + 6 * WIDTH, 0.5f);
        const auto  made = router_predictor(m);
        predictor & p    = *made;
        REQUIRE(r.set(p, 1).ok());
        const host_tensor          input(std::vector<float>(WIDTH, 0.125f), WIDTH);
        std::vector<layer_routing> predictions;
        REQUIRE(predict(p, cpu, input.tensor, 0, 1, 3, predictions).ok());
        CHECK(predictions[0].experts == std::vector<int32_t>{ 5, 0, 1 });
    }
}

TEST_CASE("layers ahead come in order, each by its own router, up to the last or the first unknown") {
    const auto               m = experts({ 8, 8, 4, 8, 8, 8 });
    const cpu_backend        cpu;
    const auto               made = router_predictor(m);
    predictor &              p    = *made;
    std::vector<test_router> routers;
    for (layer_id layer = 0; layer < 6; layer++) {
        routers.emplace_back(layer == 2 ? 4 : 8, 20 + layer);
        if (layer != 4) {
            REQUIRE(routers[layer].set(p, layer).ok());
        }
        CHECK(p.knows(layer) == (layer != 4));
    }
    const std::vector<float>   x = grid(WIDTH, 1 / 8.0f, 1.0f, 2);
    const host_tensor          input(x, WIDTH);
    std::vector<layer_routing> predictions;

    REQUIRE(predict(p, cpu, input.tensor, 0, 2, 6, predictions).ok());
    REQUIRE(predictions.size() == 2);
    check_token(predictions[0], 0, reference(routers[1], x.data(), 6));
    CHECK(predictions[1].layer == 2);
    check_token(predictions[1], 0, reference(routers[2], x.data(), 4)); // has no more

    REQUIRE(predict(p, cpu, input.tensor, 1, 4, 2, predictions).ok());
    REQUIRE(predictions.size() == 2); // 4 is not known
    CHECK(predictions[1].layer == 3);
    check_token(predictions[1], 0, reference(routers[3], x.data(), 2));

    REQUIRE(predict(p, cpu, input.tensor, 4, 3, 2, predictions).ok());
    REQUIRE(predictions.size() == 1);
    CHECK(predictions[0].layer == 5);
    REQUIRE(predict(p, cpu, input.tensor, 5, 3, 2, predictions).ok());
    CHECK(predictions.empty());
}

TEST_CASE("the running layer's gain is taken out of its input, and each router applies its own") {
    const auto               m = experts({ 16, 16, 16, 16 });
    const cpu_backend        cpu;
    const auto               made = router_predictor(m);
    predictor &              p    = *made;
    std::vector<test_router> routers;
    for (layer_id layer = 0; layer < 4; layer++) {
        routers.emplace_back(16, 50 + layer);
        if (layer != 2) { // has none
            for (int64_t i = 0; i < WIDTH; i++) {
                routers[layer].gain.push_back(std::ldexp(i % 3 ? 1.0f : -1.0f, int(i + layer) % 5 - 2));
            }
        }
    }
    routers[0].gain[7] = 0.0f;
    for (layer_id layer = 0; layer < 4; layer++) {
        REQUIRE(routers[layer].set(p, layer).ok());
    }
    constexpr int64_t n_tokens = 130; // more than one product
    for (layer_id running = 0; running < 3; running++) {
        std::vector<float>         x     = grid(n_tokens * WIDTH, 1 / 8.0f, 1.0f, 12); // before the gain
        std::vector<float>         given = x;
        const std::vector<float> & own   = routers[running].gain;
        for (size_t i = 0; i < x.size() && !own.empty(); i++) {
            given[i] *= own[i % WIDTH];
            x[i]      = given[i] == 0.0f ? 0.0f : x[i];
        }
        const host_tensor          input(given, WIDTH, n_tokens);
        std::vector<layer_routing> predictions;
        REQUIRE(predict(p, cpu, input.tensor, running, 3, 4, predictions).ok());
        REQUIRE(predictions.size() == 3 - running);
        for (const layer_routing & to : predictions) {
            test_router early = routers[to.layer];
            for (size_t i = 0; i < early.weight.size() && !early.gain.empty(); i++) {
                early.weight[i] *= early.gain[i % WIDTH];
            }
            for (int64_t t = 0; t < n_tokens; t++) {
                check_token(to, t, reference(early, &x[size_t(t * WIDTH)], 4));
            }
        }
    }
}

TEST_CASE("the running layer's experts are ranked by its own router, before and beside predictions of later layers") {
    const cpu_backend        cpu;
    const auto               made = router_predictor(experts({ 8, 8, 8 }));
    predictor &              p    = *made;
    std::vector<test_router> routers;
    for (layer_id layer = 0; layer < 3; layer++) {
        routers.emplace_back(8, 30 + layer);
        for (int64_t i = 0; i < WIDTH; i++) {
            routers[layer].gain.push_back(float(1 << (i + layer) % 3)); // halves multiply by these exactly
        }
        REQUIRE(routers[layer].set(p, layer).ok());
    }
    const std::vector<float> x = grid(2 * WIDTH, 1 / 8.0f, 1.0f, 2);
    const host_tensor        input(x, WIDTH, 2);
    for (const bool is_begun : { false, true, true }) { // the first call is what begin() hears of
        CAPTURE(is_begun);
        std::vector<int32_t>       ranking;
        std::vector<layer_routing> predictions;
        const layer_routing        running = { 1, 2, 3, {}, {} };
        if (is_begun) {
            const ggml_tensor * product = p.begin(1, 1, input.tensor, cpu.backend);
            REQUIRE(product);
            CHECK(ggml_nelements(product) == 2 * 2 * 8);
            ggml_backend_synchronize(cpu.backend);
            p.end(static_cast<const char *>(product->data));
        }
        REQUIRE(p.rank(running, input.tensor, cpu.backend, ranking).ok());
        REQUIRE(predict(p, cpu, input.tensor, 1, 1, 3, predictions).ok());
        REQUIRE(ranking.size() == 16);
        REQUIRE(predictions.size() == 1);
        test_router bare = routers[1];
        test_router next = routers[2];
        for (size_t i = 0; i < next.weight.size(); i++) {
            next.weight[i] *= next.gain[i % WIDTH] / bare.gain[i % WIDTH];
        }
        for (int64_t t = 0; t < 2; t++) {
            const choice all = reference(bare, &x[size_t(t * WIDTH)], 8);
            CHECK(std::vector<int32_t>(ranking.begin() + t * 8, ranking.begin() + (t + 1) * 8) == all.experts);
            check_token(predictions[0], t, reference(next, &x[size_t(t * WIDTH)], 3));
        }
    }
}

TEST_CASE("layers that choose different numbers of experts are predicted with their own") {
    const auto                 m = experts({ 8, 4, 16, 8 });
    const cpu_backend          cpu;
    const auto                 made   = router_predictor(m);
    predictor &                p      = *made;
    const std::vector<int64_t> n_used = { 2, 1, 6, 3 };
    std::vector<test_router>   routers;
    for (layer_id layer = 0; layer < 4; layer++) {
        routers.emplace_back(m.n_experts[layer], 60 + layer);
        routers[layer].n_used = uint32_t(n_used[layer]);
        REQUIRE(routers[layer].set(p, layer).ok());
    }
    const std::vector<float>   x = grid(WIDTH, 1 / 8.0f, 1.0f, 2);
    const host_tensor          input(x, WIDTH);
    std::vector<layer_routing> predictions;
    REQUIRE(predict(p, cpu, input.tensor, 0, 3, 2, predictions).ok());
    REQUIRE(predictions.size() == 3);
    for (const layer_routing & to : predictions) {
        check_token(to, 0, reference(routers[to.layer], x.data(), size_t(n_used[to.layer])));
    }
}

TEST_CASE("tokens of a long batch are predicted as each alone, in any layout of their rows") {
    const auto        m = experts({ 16, 16, 16 });
    const cpu_backend cpu;
    const auto        made      = router_predictor(m);
    predictor &       p         = *made;
    const test_router routers[] = { test_router(16, 31), test_router(16, 32) };
    REQUIRE(routers[0].set(p, 1).ok());
    REQUIRE(routers[1].set(p, 2).ok());
    constexpr int64_t        n_tokens = 300;
    const std::vector<float> x        = grid(2 * n_tokens * WIDTH, 1 / 8.0f, 1.0f, 5);
    const host_tensor        flat(x, WIDTH, n_tokens);
    const host_tensor        column(x, WIDTH, 1, n_tokens);
    host_tensor              wide(x, 2 * WIDTH, n_tokens); // every other row
    ggml_tensor *            view = ggml_view_2d(wide.context(), wide.tensor, WIDTH, n_tokens, wide.tensor->nb[1], 0);

    for (const ggml_tensor * input : { flat.tensor, column.tensor, view }) {
        std::vector<layer_routing> predictions;
        REQUIRE(p.accepts(input));
        REQUIRE(predict(p, cpu, input, 0, 2, 3, predictions).ok());
        REQUIRE(predictions.size() == 2);
        for (int64_t t = 0; t < n_tokens; t++) {
            const float * row = &x[size_t(input == view ? 2 * t : t) * WIDTH];
            check_token(predictions[0], t, reference(routers[0], row, 3));
            check_token(predictions[1], t, reference(routers[1], row, 3));
        }
    }
}

TEST_CASE("routers of any type that converts to float") {
    const auto        m = experts({ 16, 16 });
    const cpu_backend cpu;
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 }) {
        CAPTURE(ggml_type_name(type));
        test_router       r(16, 41);
        const host_tensor weight(type, WIDTH, 16);
        std::vector<char> raw(ggml_nbytes(weight.tensor));
        ggml_quantize_chunk(type, r.weight.data(), raw.data(), 0, 16, WIDTH, nullptr);
        ggml_backend_tensor_set(weight.tensor, raw.data(), 0, raw.size());
        if (type != GGML_TYPE_F32) {
            ggml_get_type_traits(type)->to_float(raw.data(), r.weight.data(), int64_t(r.weight.size()));
        }
        for (float & w : r.weight) {
            w = ggml_fp16_to_fp32(ggml_fp32_to_fp16(w));
        }
        const auto  made = router_predictor(m);
        predictor & p    = *made;
        REQUIRE(p.set_router(1, { weight.tensor, nullptr, nullptr, HOBBIT_GATING_SOFTMAX, nullptr, 0 }).ok());
        REQUIRE(p.knows(1));
        const std::vector<float>   x = grid(WIDTH, 1 / 8.0f, 1.0f, 6);
        const host_tensor          input(x, WIDTH);
        std::vector<layer_routing> predictions;
        REQUIRE(predict(p, cpu, input.tensor, 0, 1, 4, predictions).ok());
        check_token(predictions[0], 0, reference(r, x.data(), 4));
    }
}

TEST_CASE("what does not fit is declined") {
    const auto        m    = experts({ 8, 8, 8 });
    const auto        made = router_predictor(m);
    predictor &       p    = *made;
    const host_tensor input(std::vector<float>(WIDTH), WIDTH);
    CHECK_FALSE(p.accepts(input.tensor)); // no router yet
    CHECK(p.bytes() == 0);

    const auto set = [&](layer_id layer, int64_t width, int64_t n_experts, int64_t n_bias) {
        const host_tensor weight(GGML_TYPE_F32, width, n_experts);
        const host_tensor bias(GGML_TYPE_F32, n_bias);
        CHECK(p.set_router(layer, { weight.tensor, bias.tensor, bias.tensor, HOBBIT_GATING_SOFTMAX, nullptr, 0 }).ok());
        return p.knows(layer);
    };
    CHECK(set(0, WIDTH, 8, 8));
    CHECK_FALSE(set(1, WIDTH, 7, 7));
    CHECK_FALSE(set(1, WIDTH, 8, 7));
    CHECK_FALSE(set(1, 2 * WIDTH, 8, 8));
    test_router other(8);
    other.gain.assign(WIDTH / 2, 1.0f);
    CHECK(other.set(p, 1).ok());
    CHECK_FALSE(p.knows(1));
    CHECK(set(2, WIDTH, 8, 8));
    CHECK(p.bytes() == 3 * WIDTH * (8 * sizeof(ggml_fp16_t) + sizeof(float)));

    CHECK(p.accepts(input.tensor));
    const host_tensor narrow(GGML_TYPE_F32, WIDTH / 2);
    const host_tensor half(GGML_TYPE_F16, WIDTH);
    host_tensor       cube(GGML_TYPE_F32, WIDTH, 3, 4);
    CHECK_FALSE(p.accepts(narrow.tensor));
    CHECK_FALSE(p.accepts(half.tensor));
    CHECK(p.accepts(cube.tensor));
    const ggml_tensor * gaps =
        ggml_view_3d(cube.context(), cube.tensor, WIDTH, 2, 4, cube.tensor->nb[1], cube.tensor->nb[2], 0);
    CHECK_FALSE(p.accepts(gaps));
}

TEST_CASE("numbers that are none still name distinct experts, with weights of sum 1") {
    const auto        m = experts({ 8, 8 });
    const cpu_backend cpu;
    for (const float bad : { NAN, INFINITY, -INFINITY }) {
        const auto  made = router_predictor(m);
        predictor & p    = *made;
        test_router r(8);
        r.gating = HOBBIT_GATING_SIGMOID;
        r.bias   = { 0.0f, bad, 0.0f, 0.0f, bad, 0.0f, 0.0f, 0.0f };
        REQUIRE(r.set(p, 1).ok());
        const host_tensor          input(std::vector<float>(WIDTH, 0.5f), WIDTH);
        std::vector<layer_routing> predictions;
        REQUIRE(predict(p, cpu, input.tensor, 0, 1, 3, predictions).ok());
        const auto & chosen = predictions[0].experts;
        CHECK(std::set<int32_t>(chosen.begin(), chosen.end()).size() == 3);
        CHECK(std::count(chosen.begin(), chosen.end(), 1) == (bad > 0.0f ? 1 : 0)); // last where it is no number
        const auto & weights = predictions[0].weights;
        CHECK(std::accumulate(weights.begin(), weights.end(), 0.0) == doctest::Approx(1.0));
    }
}

TEST_CASE("a computation that the caller ends is no error of the predictor's") {
    const auto        m = experts({ 8, 8 });
    const cpu_backend cpu;
    const auto        made = router_predictor(m);
    predictor &       p    = *made;
    REQUIRE(test_router(8).set(p, 1).ok());
    const host_tensor input(std::vector<float>(WIDTH), WIDTH);
    ggml_backend_cpu_set_abort_callback(cpu.backend, [](void *) { return true; }, nullptr);
    std::vector<layer_routing> predictions;
    CHECK(predict(p, cpu, input.tensor, 0, 1, 2, predictions).is_aborted());
}
