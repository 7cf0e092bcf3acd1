// SPDX-License-Identifier: MIT
//
// Layers computed through the cache, on ggml's CPU backend, bit for bit against the same layers with plain tensors.
#include "moe-executor.h"

#include "file-reader.h"
#include "ggml-cpu.h"
#include "layer-graph.h"
#include "temp-dir.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

using namespace hobbit;

// Fails from a given read on, counted from 0.
class failing_reader final : public file_reader {
  public:
    posix_file_reader files;
    std::atomic<int>  reads_left{ 1 << 30 };

    status read_at(uint32_t file, uint64_t offset, size_t size, size_t needed, void * buf) override {
        return reads_left-- > 0 ? files.read_at(file, offset, size, needed, buf) : status::error("the disk is gone");
    }
};

// A model of 8 experts of which 2 are used, on disk and opened.
struct model_on_disk {
    moe_model    shape;
    temp_dir     dir;
    gguf_builder file;
    expert_index index;

    explicit model_on_disk(const moe_model & m = small()) : shape(m) {
        shape.add_high(file);
        shape.add_low(file);
        open();
    }

    model_on_disk(const moe_model & m, const std::function<void(gguf_builder &)> & add) : shape(m) {
        add(file);
        open();
    }

    void open() {
        const status s = index.open(file.write(dir.path("m.gguf")), "");
        REQUIRE_MESSAGE(s.ok(), s.message());
    }

    static moe_model small() {
        moe_model m;
        m.n_experts = 8;
        return m;
    }
};

// The cache over it, and what computes with it.
struct engine {
    failing_reader                reader;
    stats                         counters;
    std::unique_ptr<cache_policy> policy;
    std::unique_ptr<loader>       l = std::make_unique<loader>(reader, counters, 2);
    expert_cache                  cache;
    moe_executor                  executor;
    cpu_backend                   cpu;
    inner_graph                   inner{ cpu.backend };

    engine(const model_on_disk & m, uint32_t n_high, uint32_t n_low, score_thresholds thresholds = {}) :
        engine(m, n_high, n_low, moe_executor::config{ { thresholds }, false }) {}

    engine(const model_on_disk & m, uint32_t n_high, uint32_t n_low, const moe_executor::config & config) :
        policy(make_lru(m)),
        cache(m.index, *l, counters),
        executor(m.index, cache, *policy, nullptr, config, counters) {
        REQUIRE(reader.files.open(m.index.files()[0]).ok());
        const uint32_t slots[] = { n_high, n_low };
        for (uint32_t tier = 0; tier < TIER_COUNT; tier++) {
            if (slots[tier] > 0) {
                REQUIRE(cache.allocate(tier, ggml_backend_cpu_buffer_type(), slots[tier], 1, *policy).ok());
            }
        }
    }

    static std::unique_ptr<cache_policy> make_lru(const model_on_disk & m) {
        policy_options options;
        options.name      = "lru";
        options.n_layers  = uint32_t(m.index.n_layers());
        options.n_experts = m.index.n_experts();
        options.n_used    = 2;
        auto policy       = make_policy(options);
        policy->begin_sequence(0);
        return policy;
    }

    ~engine() { l.reset(); } // before the cache, whose memory its threads write into

    rows compute(const model_on_disk & m, const layer_input & input, uint32_t layer = 0, bool bias = false) {
        layer_graph graph(m.shape, input, bias);
        graph.set_cached(m.index, layer);
        const status s = executor.compute(graph.graph, inner);
        CHECK_MESSAGE(s.ok(), s.message());
        return graph.output();
    }
};

// The layer with plain tensors that hold one of the tiers.
static rows stock(const model_on_disk & m, const layer_input & input, uint32_t tier, uint32_t layer = 0,
                  bool bias = false) {
    layer_graph       graph(m.shape, input, bias);
    const std::string suffix = tier == TIER_HIGH ? "" : ".low.0";
    const ggml_type   type   = tier == TIER_HIGH ? m.shape.high : m.shape.low;
    graph.set_plain([&](const std::string & part) {
        return plain_weight{ type, m.file.data(moe_model::name(layer, part, suffix)) };
    });
    cpu_backend cpu;
    REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
    return graph.output();
}

// What each expert of the batch is worth by Eq. 2, in the words of the paper: the best of what its tokens ask for.
static std::vector<precision> worth_of_experts(const layer_input & input, score_thresholds thresholds,
                                               size_t n_experts) {
    std::vector<precision> worth(n_experts, PRECISION_SKIP);
    for (int64_t t = 0; t < input.n_tokens; t++) {
        for (int64_t k = 0; k < input.n_used; k++) {
            const float * weights = &input.weights[size_t(t * input.n_used)];
            double        before  = 0;
            double        sum     = 0;
            bool          first   = true;
            for (int64_t other = 0; other < input.n_used; other++) {
                sum += weights[other];
                if (weights[other] > weights[k]) {
                    before += weights[other];
                    first   = false;
                }
            }
            const double    score = before / sum;
            const precision p     = first || score <= thresholds.t1 ? PRECISION_HIGH
                                    : score <= thresholds.t2        ? PRECISION_LOW
                                                                    : PRECISION_SKIP;
            precision &     best  = worth[size_t(input.ids[size_t(t * input.n_used + k)])];
            best                  = std::max(best, p);
        }
    }
    return worth;
}

// Rows of the high and the low reference, or zeros, by what the selected experts are worth.
static rows compose(const layer_input & input, const std::vector<precision> & worth, const rows & high,
                    const rows & low) {
    rows out = high;
    for (size_t i = 0; i < out.size(); i++) {
        const precision p = worth[size_t(input.ids[i])];
        if (p == PRECISION_LOW) {
            out[i] = low[i];
        } else if (p == PRECISION_SKIP) {
            out[i].assign(out[i].size(), 0.0f);
        }
    }
    return out;
}

TEST_CASE("everything high: the output is stock's, whatever the batch and the pool") {
    const model_on_disk m;
    for (const int64_t n_tokens : { 1, 2, 37 }) {
        for (const uint32_t n_slots :
             { 16u, 8u, 3u, 2u, 1u }) { // all layers, one layer, less than a batch, n_used, less
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
            engine            e(m, n_slots, 0);
            CHECK(e.compute(m, input) == stock(m, input, TIER_HIGH));
            CHECK(e.counters.selections[TIER_HIGH] == uint64_t(n_tokens * 2));
            CHECK(e.counters.layers_computed == 1);
            CHECK((e.counters.waves > 1) == (n_tokens == 37 ? n_slots < 8 : n_slots < e.counters.misses[TIER_HIGH]));
        }
    }
}

TEST_CASE("the same batch again finds its experts and gives the same output") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 2, 5);
    engine              e(m, 8, 0);
    const rows          expected = stock(m, input, TIER_HIGH);
    CHECK(e.compute(m, input) == expected);
    const uint64_t misses = e.counters.misses[TIER_HIGH];
    const uint64_t read   = e.counters.bytes_read;
    CHECK(e.compute(m, input) == expected);
    CHECK(e.counters.misses[TIER_HIGH] == misses);
    CHECK(e.counters.hits[TIER_HIGH] == misses);
    CHECK(e.counters.bytes_read == read);
}

TEST_CASE("layers take turns in a pool too small for both") {
    const model_on_disk m;
    engine              e(m, 3, 0);
    for (unsigned token = 0; token < 12; token++) {
        for (uint32_t layer = 0; layer < 2; layer++) {
            const layer_input input = random_input(m.shape, token % 4 == 3 ? 9 : 1, token);
            CHECK(e.compute(m, input, layer) == stock(m, input, TIER_HIGH, layer));
        }
    }
    CHECK(e.counters.evictions > 0);
}

TEST_CASE("t1 = 0: each token's first expert is high, the others are low") {
    const model_on_disk m;
    for (const int64_t n_tokens : { 1, 2, 37 }) {
        for (const uint32_t n_slots : { 8u, 2u, 1u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(m.shape, n_tokens, 7);
            engine            e(m, n_slots, n_slots, score_thresholds{ 0.0, 1.0 });
            const auto        worth = worth_of_experts(input, { 0.0, 1.0 }, 8);
            CHECK(e.compute(m, input) == compose(input, worth, stock(m, input, TIER_HIGH), stock(m, input, TIER_LOW)));
            CHECK(e.counters.selections[TIER_HIGH] + e.counters.selections[TIER_LOW] == uint64_t(2 * n_tokens));
            CHECK(e.counters.selections_skipped == 0);
        }
    }
}

TEST_CASE("t2 below 1: what is skipped is zero, with a bias and without") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk    m(shape);
    const score_thresholds thresholds = { 0.3, 0.6 };
    for (const bool bias : { false, true }) {
        for (const int64_t n_tokens : { 1, 2, 3 }) {
            CAPTURE(bias);
            CAPTURE(n_tokens);
            const layer_input input = random_input(shape, n_tokens, 11);
            const auto        worth = worth_of_experts(input, thresholds, 8);
            engine            e(m, 8, 8, thresholds);
            CHECK(e.compute(m, input, 0, bias) ==
                  compose(input, worth, stock(m, input, TIER_HIGH, 0, bias), stock(m, input, TIER_LOW, 0, bias)));
            uint64_t skipped = 0;
            for (const int32_t id : input.ids) {
                skipped += worth[size_t(id)] == PRECISION_SKIP;
            }
            CHECK(e.counters.selections_skipped == skipped);
            CHECK((n_tokens > 1 || skipped > 0));
        }
    }
}

TEST_CASE("an expert that is there in a better precision is used in it") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 13);
    engine              e(m, 8, 8, score_thresholds{ 0.0, 0.0 });
    // all experts of the token come into the high pool
    for (const int32_t id : input.ids) {
        REQUIRE(e.cache.acquire({ 0, uint32_t(id) }, TIER_HIGH));
        e.cache.request({ 0, uint32_t(id) }, TIER_HIGH, m.index.layer(0).parts);
        REQUIRE(e.cache.wait({ 0, uint32_t(id) }, TIER_HIGH, m.index.layer(0).parts).ok());
        e.cache.release({ 0, uint32_t(id) }, TIER_HIGH);
    }
    CHECK(e.compute(m, input) == stock(m, input, TIER_HIGH));
    CHECK(e.counters.selections_skipped == 0);
    CHECK(e.counters.hits[TIER_HIGH] == 2);
}

TEST_CASE("experts of one tier may have types of their own") {
    const moe_model     shape = model_on_disk::small();
    const model_on_disk m(shape, [&](gguf_builder & file) {
        moe_model one_layer = shape;
        one_layer.n_layers  = 1;
        one_layer.add_high(file);
        moe_model::declare_tiers(file);
        for (const std::string part : { "gate", "up", "down" }) {
            const std::string stem  = "blk.0.ffn_" + part + "_exps";
            const bool        down  = part == "down";
            const int64_t     n_in  = down ? shape.n_ff : shape.n_embd;
            const int64_t     n_out = down ? shape.n_embd : shape.n_ff;
            file.add(stem + ".low.0.weight", GGML_TYPE_Q8_0, n_in, n_out, 3);
            file.set_ints("hobbit.tier.low." + stem + ".0.experts", { 6, 1, 4 });
            file.add(stem + ".low.1.weight", GGML_TYPE_Q4_1, n_in, n_out, 5);
            file.set_ints("hobbit.tier.low." + stem + ".1.experts", { 0, 2, 3, 5, 7 });
        }
    });
    for (const int64_t n_tokens : { 1, 21 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(shape, n_tokens, 17);
        engine            e(m, 8, 2, score_thresholds{ 0.0, 1.0 });
        const rows        out   = e.compute(m, input);
        const auto        worth = worth_of_experts(input, { 0.0, 1.0 }, 8);
        // each expert on its own, as a plain model with one expert
        for (int32_t id = 0; id < 8; id++) {
            const uint32_t tier   = worth[size_t(id)] == PRECISION_HIGH ? TIER_HIGH : TIER_LOW;
            layer_input    single = input;
            single.ids.assign(input.ids.size(), 0);
            moe_model one_expert = shape;
            one_expert.n_experts = 1;
            layer_graph graph(one_expert, single);
            graph.set_plain([&](const std::string & part) {
                const uint32_t        p  = part == "gate" ? PART_GATE : part == "up" ? PART_UP : PART_DOWN;
                const part_location & at = m.index.locate(tier, 0, p, uint32_t(id));
                return plain_weight{ at.type, temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) };
            });
            cpu_backend cpu;
            REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
            const rows expected = graph.output();
            for (size_t i = 0; i < input.ids.size(); i++) {
                if (input.ids[i] == id) {
                    CHECK(out[i] == expected[i]);
                }
            }
        }
    }
}

TEST_CASE("gate and up in one tensor") {
    moe_model shape = model_on_disk::small();
    shape.fused     = true;
    const model_on_disk m(shape);
    for (const int64_t n_tokens : { 1, 5 }) {
        for (const uint32_t n_slots : { 8u, 1u }) {
            const layer_input input = random_input(shape, n_tokens, 19);
            engine            e(m, n_slots, 0);
            CHECK(e.compute(m, input) == stock(m, input, TIER_HIGH));
        }
    }
}

TEST_CASE("a layer computed node by node, as under an evaluation callback, is the layer") {
    const model_on_disk m;
    for (const uint32_t n_slots : { 8u, 1u }) {
        for (const int64_t n_tokens : { 1, 6 }) {
            CAPTURE(n_slots);
            CAPTURE(n_tokens);
            const layer_input input = random_input(m.shape, n_tokens, 23);
            engine            e(m, n_slots, 0);
            layer_graph       graph(m.shape, input);
            graph.set_cached(m.index, 0);
            for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
                ggml_cgraph  view = ggml_graph_view(graph.graph, i, i + 1);
                const status s    = e.executor.compute(&view, e.inner);
                CHECK_MESSAGE(s.ok(), s.message());
            }
            CHECK(graph.output() == stock(m, input, TIER_HIGH));
        }
    }
}

//
// strict, random, renormalized; reports
//

// What serves each selection, by the rules for one token alone.
static std::vector<precision> strict_precisions(const layer_input & input, score_thresholds thresholds) {
    std::vector<precision> out(input.ids.size());
    for (int64_t t = 0; t < input.n_tokens; t++) {
        score_experts(&input.weights[size_t(t * input.n_used)], size_t(input.n_used), thresholds,
                      &out[size_t(t * input.n_used)]);
    }
    return out;
}

TEST_CASE("strict: each token gets its own precision, whatever is resident and others ask for") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk    m(shape);
    const score_thresholds thresholds = { 0.3, 0.6 };
    for (const int64_t n_tokens : { 1, 9 }) {
        for (const uint32_t n_slots : { 8u, 2u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input    input = random_input(shape, n_tokens, 41);
            moe_executor::config config;
            config.rules.thresholds = thresholds;
            config.rules.strict     = true;
            engine     e(m, n_slots, n_slots, config);
            const auto precisions = strict_precisions(input, thresholds);
            const rows high       = stock(m, input, TIER_HIGH);
            const rows low        = stock(m, input, TIER_LOW);
            for (int again = 0; again < 2; again++) {
                const rows out = e.compute(m, input);
                for (size_t i = 0; i < out.size(); i++) {
                    const rows zero(1, std::vector<float>(out[i].size(), 0.0f));
                    CHECK(out[i] == (precisions[i] == PRECISION_HIGH  ? high[i]
                                     : precisions[i] == PRECISION_LOW ? low[i]
                                                                      : zero[0]));
                }
            }
        }
    }
}

TEST_CASE("random precisions come in the shares asked for") {
    const model_on_disk  m;
    moe_executor::config config;
    config.rules            = { { 0.25, 0.75 }, true, true, false };
    const int64_t     n     = 400;
    const layer_input input = random_input(m.shape, n, 43);
    engine            e(m, 8, 8, config);
    e.compute(m, input);
    CHECK(double(e.counters.selections[TIER_HIGH]) == doctest::Approx(0.25 * 2 * n).epsilon(0.15));
    CHECK(double(e.counters.selections[TIER_LOW]) == doctest::Approx(0.5 * 2 * n).epsilon(0.15));
    CHECK(double(e.counters.selections_skipped) == doctest::Approx(0.25 * 2 * n).epsilon(0.15));
}

TEST_CASE("renormalized: the weight of what is skipped goes to the others of the token") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk    m(shape);
    const score_thresholds thresholds = { 0.3, 0.6 };
    const layer_input      input      = random_input(shape, 5, 47);
    moe_executor::config   config;
    config.rules.thresholds = thresholds;
    config.rules.strict     = true;
    engine     plain(m, 8, 8, config);
    const rows before  = plain.compute(m, input);
    config.renormalize = true;
    engine     e(m, 8, 8, config);
    const rows after      = e.compute(m, input);
    const auto precisions = strict_precisions(input, thresholds);
    for (size_t t = 0; t < 5; t++) {
        double kept = 0; // of a sum of 1
        for (size_t k = 0; k < 4; k++) {
            kept += precisions[4 * t + k] == PRECISION_SKIP ? 0.0 : double(input.weights[4 * t + k]);
        }
        CHECK(kept < 0.999);
        for (size_t i = 4 * t; i < 4 * t + 4; i++) {
            for (size_t j = 0; j < before[i].size(); j++) {
                CHECK(double(after[i][j]) == doctest::Approx(double(before[i][j]) / kept).epsilon(1e-5));
            }
        }
    }
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
        engine            e(m, 8, 8, score_thresholds{ 0.5, 0.7 });
        batch_info        batch;
        const int32_t     sequences[] = { 4, 4, 7 };
        const int32_t     positions[] = { 10, 11, 3 };
        const int8_t      outputs[]   = { 0, 1, 1 };
        batch.begin(3, sequences, positions, outputs);
        e.executor.begin_batch(batch);
        int n_reports = 0;
        e.executor.set_observer([&](const layer_report & r) {
            n_reports++;
            CHECK(r.routing.experts == input.ids);
            CHECK(r.routing.weights == input.weights);
            CHECK(r.rows[1].position == 11);
            CHECK(r.rows[2].sequence == 7);
            CHECK(r.was_resident == std::vector<uint8_t>(6, 0));
            CHECK(r.plan.precisions.size() == 6);
            CHECK(r.router_input == input.x);
            CHECK(ggml_nrows(r.output) == 6);
        });
        layer_graph graph(m.shape, input);
        ggml_tensor router_input;
        graph.set_cached(m.index, 0);
        set_router_input(graph, input.x, router_input);
        for (int i = 0; node_by_node && i < ggml_graph_n_nodes(graph.graph); i++) {
            ggml_cgraph view = ggml_graph_view(graph.graph, i, i + 1);
            REQUIRE(e.executor.compute(&view, e.inner).ok());
        }
        if (!node_by_node) {
            REQUIRE(e.executor.compute(graph.graph, e.inner).ok());
        }
        CHECK(n_reports == 1);
    }
}

TEST_CASE("two layers in one graph are both finished, in waves too") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk        m(shape);
    const layer_input          input = random_input(shape, 3, 59);
    const moe_executor::config strict{ { { 0.3, 0.6 }, true }, true };
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
        CHECK(e.executor.compute(graph, e.inner).ok());
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

//
// errors
//

// The executor's answer to the graph, which it must give for ever after.
static std::string error_of(engine & e, const model_on_disk & m, const layer_input & input, bool with_weights = true) {
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0, with_weights);
    const std::string message = e.executor.compute(graph.graph, e.inner).message();
    layer_graph       good(m.shape, random_input(m.shape, 1, 1));
    good.set_cached(m.index, 0);
    CHECK(e.executor.compute(good.graph, e.inner).message() == message);
    return message;
}

TEST_CASE("an expert that does not exist is an error") {
    const model_on_disk m;
    for (const int32_t id : { -1, 8, 1 << 30 }) {
        CAPTURE(id);
        layer_input input = random_input(m.shape, 2, 29);
        input.ids[3]      = id;
        engine e(m, 8, 0);
        CHECK(error_of(e, m, input) ==
              "the router chose expert " + std::to_string(id) + " of 8 in 'blk.0.ffn_gate_exps.weight'");
    }
}

TEST_CASE("a read that fails is an error, whichever it is") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 9, 31);
    for (int n = 0; n < 12; n++) {
        for (const uint32_t n_slots : { 8u, 2u }) {
            CAPTURE(n);
            CAPTURE(n_slots);
            engine e(m, n_slots, 0);
            e.reader.reads_left = n;
            CHECK(error_of(e, m, input) == "the disk is gone");
        }
    }
}

TEST_CASE("a computation that is aborted may be repeated, whatever was on its way") {
    const model_on_disk m;
    const layer_input   input    = random_input(m.shape, 37, 3);
    const rows          expected = stock(m, input, TIER_HIGH);
    for (const uint32_t n_slots : { 16u, 3u, 1u }) {
        for (int polls = 0; polls < 12; polls++) {
            CAPTURE(n_slots);
            CAPTURE(polls);
            engine e(m, n_slots, 0);
            int    left = polls;
            ggml_backend_cpu_set_abort_callback(e.cpu.backend, [](void * data) { return --*(int *) data < 0; }, &left);
            layer_graph graph(m.shape, input);
            graph.set_cached(m.index, 0);
            const status s = e.executor.compute(graph.graph, e.inner);
            CHECK(s.is_aborted());
            ggml_backend_cpu_set_abort_callback(e.cpu.backend, nullptr, nullptr);
            CHECK(e.compute(m, input, 1) == stock(m, input, TIER_HIGH, 1));
            CHECK(e.compute(m, input) == expected);
        }
    }
}

TEST_CASE("thresholds without the router's weights are an error, t1 = 1 needs none") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 37);
    engine              e(m, 8, 8, score_thresholds{ 0.5, 1.0 });
    CHECK(error_of(e, m, input, false) ==
          "the router weights of 'blk.0.ffn_gate_exps.weight' are not known: run this model with t1 = 1");

    engine      high(m, 8, 0);
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0, false);
    CHECK(high.executor.compute(graph.graph, high.inner).ok());
    CHECK(graph.output() == stock(m, input, TIER_HIGH));
}
