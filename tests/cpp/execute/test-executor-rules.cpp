// SPDX-License-Identifier: MIT
//
// Rules for measuring (strict, random), and what the executor reports.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"
#include "plan/precision-rule.h"

#include <algorithm>
#include <map>
#include <vector>

// The precision of each selection, by the rules for one token alone.
static std::vector<precision> strict_precisions(const layer_input & input, rule_numbers thresholds) {
    const layer_routing routing = { 0, input.n_tokens, input.n_used, input.ids, input.weights };
    const std::vector   of_tokens(size_t(input.n_tokens), thresholds);
    return registered_rule::make({ "gate" })->decide({ routing, of_tokens, {}, true });
}

TEST_CASE("strict: each token gets its own precision, whatever is resident and others ask for") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    const rule_numbers  thresholds = numbers(0.3, 0.6);
    for (const int64_t n_tokens : { 1, 9 }) {
        for (const uint32_t n_slots : { 8u, 2u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(shape, n_tokens, 41);
            rules             config;
            config.thresholds = thresholds;
            config.strict     = true;
            engine     e(m, n_slots, n_slots, config);
            const auto precisions = strict_precisions(input, thresholds);
            const rows high       = stock(m, input, tier_id::high);
            const rows low        = stock(m, input, tier_id::low);
            for (int again = 0; again < 2; again++) {
                const rows out = e.compute(m, input);
                for (size_t i = 0; i < out.size(); i++) {
                    const rows zero(1, std::vector<float>(out[i].size(), 0.0f));
                    CHECK(out[i] == (precisions[i] == precision::high  ? high[i]
                                     : precisions[i] == precision::low ? low[i]
                                                                       : zero[0]));
                }
            }
        }
    }
}

TEST_CASE("a sequence's own thresholds are those of its tokens alone, until they are cleared") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    const rule_numbers  own[] = { numbers(0.2, 0.5), numbers(1.0, 1.0) };
    const layer_input   input = random_input(shape, 2, 59);
    rules               config;
    config.thresholds = numbers(0.5, 0.8);
    config.strict     = true;
    engine        e(m, 8, 8, config);
    const int32_t sequences[] = { 7, 3 };
    const int32_t positions[] = { 5, 5 };
    const int8_t  outputs[]   = { 1, 1 };
    batch_info    batch;
    batch.begin(2, sequences, positions, outputs);
    e.run.batch = batch;
    std::vector<precision> seen;
    e.run.observer = [&](const layer_report & r) { seen = r.plan.precisions; };

    const auto expect = [&](const rule_numbers & first, const rule_numbers & second) {
        std::vector<precision>       wanted = strict_precisions(input, first);
        const std::vector<precision> other  = strict_precisions(input, second);
        std::copy(other.begin() + 4, other.end(), wanted.begin() + 4);
        e.compute(m, input);
        CHECK(seen == wanted);
    };
    e.run.thresholds.set(7, own[0]);
    e.run.thresholds.set(3, own[1]);
    expect(own[0], own[1]);
    e.run.thresholds.clear(3, 4);
    expect(own[0], config.thresholds);
    e.run.thresholds.clear(7, 8);
    expect(config.thresholds, config.thresholds);
    CHECK(strict_precisions(input, own[0]) != strict_precisions(input, config.thresholds));
}

TEST_CASE("random precisions come in the shares asked for") {
    const model_on_disk m;
    rules               config;
    config                  = { numbers(0.25, 0.75), true, "random" };
    const int64_t     n     = 400;
    const layer_input input = random_input(m.shape, n, 43);
    engine            e(m, 8, 8, config);
    e.compute(m, input);
    CHECK(double(e.counters.selections[tier_id::high]) == doctest::Approx(0.25 * 2 * n).epsilon(0.15));
    CHECK(double(e.counters.selections[tier_id::low]) == doctest::Approx(0.5 * 2 * n).epsilon(0.15));
    CHECK(double(e.counters.selections_skipped) == doctest::Approx(0.25 * 2 * n).epsilon(0.15));
}

// Gives the layer's matmuls a router's input whose memory the layer's output takes, as a graph allocator may do.
static void set_router_input(layer_graph & graph, const std::vector<float> & x, ggml_tensor & input) {
    input       = *ggml_graph_node(graph.graph, -1);
    input.op    = GGML_OP_NONE;
    input.ne[1] = int64_t(x.size()) / input.ne[0];
    input.ne[2] = 1;
    input.nb[2] = input.nb[3] = x.size() * sizeof(float);
    ggml_backend_tensor_set(&input, x.data(), 0, x.size() * sizeof(float));
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
        ggml_tensor * node = ggml_graph_node(graph.graph, i);
        node->src[4]       = node->op == GGML_OP_MUL_MAT_ID ? &input : nullptr;
    }
}

TEST_CASE("every layer is reported once, with what was there before it ran and the outputs") {
    const model_on_disk m;
    for (const bool node_by_node : { false, true }) {
        const layer_input input = random_input(m.shape, 3, 53);
        engine            e(m, 8, 8, numbers(0.5, 0.7));
        batch_info        batch;
        const int32_t     sequences[] = { 4, 4, 7 };
        const int32_t     positions[] = { 10, 11, 3 };
        const int8_t      outputs[]   = { 0, 1, 1 };
        batch.begin(3, sequences, positions, outputs);
        e.run.batch    = batch;
        int n_reports  = 0;
        e.run.observer = [&](const layer_report & r) {
            n_reports++;
            CHECK(r.routing.experts == input.ids);
            CHECK(r.routing.weights == input.weights);
            CHECK(r.rows[1].position == 11);
            CHECK(r.rows[2].sequence == 7);
            CHECK(r.was_resident == std::vector<per_tier<bool>>(6));
            CHECK(r.plan.precisions.size() == 6);
            CHECK(r.router_input == input.x);
            CHECK(ggml_nrows(r.output) == 6);
        };
        layer_graph graph(m.shape, input);
        ggml_tensor router_input;
        graph.set_cached(m.index, 0);
        set_router_input(graph, input.x, router_input);
        for (int i = 0; node_by_node && i < ggml_graph_n_nodes(graph.graph); i++) {
            ggml_cgraph view = ggml_graph_view(graph.graph, i, i + 1);
            REQUIRE(e.executor.compute(&view, e.inner, &e.cpu_graph).ok());
        }
        if (!node_by_node) {
            REQUIRE(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).ok());
        }
        CHECK(n_reports == 1);
    }
}

TEST_CASE("two layers in one graph are both finished, in waves too") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    const layer_input   input = random_input(shape, 3, 59);
    const rules         strict{ numbers(0.3, 0.6), true };
    for (const uint32_t n_slots : { 16u, 1u }) {
        CAPTURE(n_slots);
        engine      e(m, n_slots, n_slots, strict);
        engine      apart(m, 16, 16, strict);
        layer_graph first(shape, input, true);
        layer_graph second(shape, input, true);
        first.set_cached(m.index, 0);
        second.set_cached(m.index, 1);
        ggml_context * ctx   = ggml_init({ ggml_graph_overhead(), nullptr, /* .no_alloc = */ true });
        ggml_cgraph *  graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, ggml_graph_node(first.graph, -1));
        ggml_build_forward_expand(graph, ggml_graph_node(second.graph, -1));
        CHECK(e.executor.compute(graph, e.inner, &e.cpu_graph).ok());
        CHECK(first.output() == apart.compute(m, input, 0, true));
        CHECK(second.output() == apart.compute(m, input, 1, true));
        ggml_free(ctx);
    }
}

TEST_CASE("rows of a layer are all tokens, or those whose output is wanted") {
    batch_info    batch;
    const int32_t sequences[] = { 0, 0, 1 };
    const int32_t positions[] = { 5, 6, 2 };
    const int8_t  outputs[]   = { 0, 1, 1 };
    batch.begin(3, sequences, positions, outputs);
    CHECK(batch.sequences() == std::map<int32_t, uint32_t>{ { 0, 2 }, { 1, 1 } });
    CHECK(batch.rows(3)[0].position == 5);
    CHECK(batch.rows(2)[0].position == 6);
    CHECK(batch.rows(2)[1].sequence == 1);
    CHECK(batch.rows(7).size() == 7); // nothing that was announced
    CHECK(batch.rows(7)[0].position == -1);
}
