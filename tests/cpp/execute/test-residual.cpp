// SPDX-License-Identifier: MIT
//
// Experts that are a low version and a residual: computed through the cache, bit for bit against ggml's own sum of the
// two products.
#include "device/repacked-layout.h"
#include "fixtures/executor-fixture.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

static constexpr part_set ALL = part_id::up | part_id::gate | part_id::down;

static moe_model quantized(uint32_t n_used = 2) {
    moe_model m = model_on_disk::small();
    m.n_used    = n_used;
    m.low       = GGML_TYPE_Q4_0;
    m.high      = GGML_TYPE_Q5_0;
    return m;
}

// Bytes of the experts' tensors of one term, as they are read.
static uint64_t bytes_of(const model_on_disk & m, term_id term, const std::set<int32_t> & experts) {
    uint64_t bytes = 0;
    for (const int32_t e : experts) {
        for (const part_id part : m.index.layer(0).parts) {
            bytes += aligned_span(m.index.locate(term, 0, part, uint32_t(e)));
        }
    }
    return bytes;
}

TEST_CASE("everything high is the sum of both products, whatever the batch and the pools") {
    const model_on_disk m = model_on_disk::with_residual(quantized());
    REQUIRE(m.index.kind(tier_id::high) == tier_kind::residual);
    for (const int64_t n_tokens : { 1, 2, 37 }) {
        const layer_input input    = random_input(m.shape, n_tokens, unsigned(n_tokens));
        const rows        expected = stock(m, input, tier_id::high);
        REQUIRE(expected != stock(m, input, tier_id::low));
        for (const uint32_t n_low : { 16u, 8u, 3u, 1u }) {
            for (const uint32_t n_high : { 16u, 3u, 2u, 1u }) {
                CAPTURE(n_tokens);
                CAPTURE(n_low);
                CAPTURE(n_high);
                engine e(m, std::min(n_high, n_low), n_low);
                CHECK(e.compute(m, input) == expected);
                CHECK(e.compute(m, input) == expected);
                CHECK(e.counters.selections[tier_id::high] == uint64_t(n_tokens * 4));
            }
        }
    }
}

TEST_CASE("gate and up in one tensor, or apart") {
    for (const bool fused : { false, true }) {
        moe_model shape                     = quantized();
        (fused ? shape.fused : shape.apart) = true;
        const model_on_disk m               = model_on_disk::with_residual(shape);
        for (const int64_t n_tokens : { 1, 9 }) {
            for (const uint32_t n_slots : { 8u, 1u }) {
                const layer_input input = random_input(m.shape, n_tokens, 3);
                engine            e(m, n_slots, n_slots);
                CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
            }
        }
    }
}

TEST_CASE("in the device's own layout") {
    moe_model shape                         = quantized();
    shape.n_embd                            = 256;
    shape.n_ff                              = 768;
    shape.high                              = GGML_TYPE_Q4_0;
    ggml_backend_dev_t               cpu    = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const ggml_backend_buffer_type_t layout = packed_layout(cpu, GGML_TYPE_Q4_0, { 256, 768 }, 8);
    const ggml_backend_buffer_type_t buft   = layout ? layout : ggml_backend_cpu_buffer_type();
    const model_on_disk              m      = model_on_disk::with_residual(shape);
    for (const int64_t n_tokens : { 1, 3, 37 }) {
        for (const uint32_t n_slots : { 16u, 3u, 1u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
            engine            e(m, n_slots, n_slots, rules{ {} }, { cpu, true });
            CHECK(e.compute(m, input) == stock(m, input, tier_id::high, 0, false, buft));
        }
    }
}

TEST_CASE("residuals may have types of their own in groups") {
    const moe_model     shape = quantized();
    const model_on_disk one   = model_on_disk::with_residual(shape);
    const model_on_disk m(shape, [&](gguf_builder & file) {
        moe_model::declare_residual(file);
        shape.add_tensors(file, shape.low, "");
        for (layer_id layer = 0; layer < 2; layer++) {
            for (const std::string part : { "gate", "up", "down" }) {
                const std::string stem  = "blk." + std::to_string(layer) + ".ffn_" + part + "_exps";
                const int64_t     n_in  = part == "down" ? shape.n_ff : shape.n_embd;
                const int64_t     n_out = part == "down" ? shape.n_embd : shape.n_ff;
                file.add(stem + ".high.0.weight", GGML_TYPE_Q8_0, n_in, n_out, 3);
                file.set_ints("hobbit.tier.high." + stem + ".0.experts", { 6, 1, 4 });
                file.add(stem + ".high.1.weight", GGML_TYPE_Q4_1, n_in, n_out, 5);
                file.set_ints("hobbit.tier.high." + stem + ".1.experts", { 0, 2, 3, 5, 7 });
            }
        }
    });
    const layer_input   input = random_input(shape, 21, 17);
    engine              e(m, 4, 8);
    const rows          out = e.compute(m, input);
    for (int32_t id = 0; id < 8; id++) { // each expert on its own, as a plain model with one expert
        layer_input single = input;
        single.ids.assign(input.ids.size(), 0);
        moe_model one_expert = shape;
        one_expert.n_experts = 1;
        layer_graph graph(one_expert, single, false, 2);
        graph.set_terms([&](const std::string & part, size_t term) {
            const part_id         p  = part == "gate" ? part_id::gate : part == "up" ? part_id::up : part_id::down;
            const part_location & at = m.index.locate(m.index.terms(tier_id::high)[term], 0, p, uint32_t(id));
            return plain_weight{ at.type, temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) };
        });
        cpu_backend cpu;
        REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
        const rows expected = graph.output();
        for (size_t i = 0; i < input.ids.size(); i++) {
            CHECK((input.ids[i] != id || out[i] == expected[i]));
        }
    }
}

TEST_CASE("strict: what is high is the sum, what is low the low version alone, what is skipped zero") {
    const model_on_disk    m          = model_on_disk::with_residual(quantized(4));
    const score_thresholds thresholds = { 0.3, 0.6 };
    for (const int64_t n_tokens : { 1, 9 }) {
        for (const uint32_t n_slots : { 8u, 2u, 1u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input      input = random_input(m.shape, n_tokens, 41);
            engine                 e(m, n_slots, n_slots, rules{ thresholds, true });
            std::vector<precision> worth(input.ids.size());
            for (size_t i = 0; i < worth.size(); i += 4) {
                score_experts(&input.weights[i], 4, thresholds, &worth[i]);
            }
            const rows high = stock(m, input, tier_id::high);
            const rows low  = stock(m, input, tier_id::low);
            for (int again = 0; again < 2; again++) {
                const rows out = e.compute(m, input);
                for (size_t i = 0; i < out.size(); i++) {
                    const std::vector<float> zero(out[i].size(), 0.0f);
                    CHECK(out[i] == (worth[i] == precision::high  ? high[i]
                                     : worth[i] == precision::low ? low[i]
                                                                  : zero));
                }
            }
        }
    }
}

TEST_CASE("an upgrade reads the residual alone, and a downgrade reads nothing") {
    const model_on_disk     m     = model_on_disk::with_residual(quantized());
    const layer_input       input = random_input(m.shape, 1, 7);
    const std::set<int32_t> chosen(input.ids.begin(), input.ids.end());
    engine                  e(m, 8, 8);
    for (const int32_t id : input.ids) {
        REQUIRE(e.cache.acquire({ 0, uint32_t(id) }, tier_id::low));
        e.cache.request({ 0, uint32_t(id) }, tier_id::low, ALL);
        REQUIRE(e.cache.wait({ 0, uint32_t(id) }, tier_id::low, ALL).ok());
        e.cache.release({ 0, uint32_t(id) }, tier_id::low);
    }
    CHECK(e.counters.bytes_read == bytes_of(m, term_id::low, chosen));
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.misses[tier_id::high] == 2);
    CHECK(e.counters.bytes_read == bytes_of(m, term_id::low, chosen) + bytes_of(m, term_id::high, chosen));

    engine strict(m, 8, 8, rules{ { 0.0, 1.0 }, true }); // one high, one low
    strict.compute(m, input);
    strict.run.thresholds.set({ 1.0, 1.0 });
    CHECK(strict.compute(m, input) == stock(m, input, tier_id::high));
    const uint64_t read = strict.counters.bytes_read;
    CHECK(read == bytes_of(m, term_id::low, chosen) + bytes_of(m, term_id::high, chosen));
    strict.run.thresholds.set({ 0.0, 1.0 });
    strict.compute(m, input);
    CHECK(strict.counters.bytes_read == read);
}

TEST_CASE("every part of every term is read once, however few slots there are") {
    const model_on_disk     m        = model_on_disk::with_residual(quantized());
    const layer_input       input    = random_input(m.shape, 37, 3); // all experts
    const std::set<int32_t> all      = { 0, 1, 2, 3, 4, 5, 6, 7 };
    const rows              expected = stock(m, input, tier_id::high);
    REQUIRE(std::set<int32_t>(input.ids.begin(), input.ids.end()) == all);
    for (const uint32_t n_slots : { 1u, 2u, 5u, 8u }) {
        CAPTURE(n_slots);
        engine e(m, n_slots, n_slots);
        CHECK(e.compute(m, input) == expected);
        CHECK(e.counters.bytes_read == bytes_of(m, term_id::low, all) + bytes_of(m, term_id::high, all));
    }
}

TEST_CASE("layers take turns in pools too small for both, in any precision") {
    const model_on_disk                        m = model_on_disk::with_residual(quantized());
    engine                                     e(m, 2, 3, score_thresholds{ 0.0, 1.0 });
    std::map<uint32_t, std::vector<precision>> seen;
    e.run.observer = [&](const layer_report & r) { seen[r.routing.layer] = r.plan.precisions; };
    for (unsigned token = 0; token < 24; token++) {
        for (layer_id layer = 0; layer < 2; layer++) {
            const layer_input input = random_input(m.shape, token % 4 == 3 ? 9 : 1, token);
            const rows        out   = e.compute(m, input, layer);
            const rows        high  = stock(m, input, tier_id::high, layer);
            const rows        low   = stock(m, input, tier_id::low, layer);
            for (size_t i = 0; i < out.size(); i++) {
                CHECK(out[i] == (seen[layer][i] == precision::high ? high[i] : low[i]));
            }
        }
    }
    CHECK(e.counters.selections[tier_id::low] > 0);
    CHECK(e.counters.evictions > 0);
}

TEST_CASE("a read that fails is an error, whichever it is") {
    const model_on_disk m     = model_on_disk::with_residual(quantized());
    const layer_input   input = random_input(m.shape, 9, 31);
    for (int n = 0; n < 16; n++) {
        for (const uint32_t n_slots : { 8u, 2u }) {
            CAPTURE(n);
            engine e(m, n_slots, n_slots);
            e.reader.reads_left = n;
            layer_graph graph(m.shape, input);
            graph.set_cached(m.index, 0);
            CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message() == "the disk is gone");
        }
    }
}

TEST_CASE("a computation that is aborted may be repeated, whatever was on its way") {
    const model_on_disk m        = model_on_disk::with_residual(quantized());
    const layer_input   input    = random_input(m.shape, 37, 3);
    const rows          expected = stock(m, input, tier_id::high);
    for (const uint32_t n_slots : { 16u, 3u }) {
        bool was_aborted = true;
        for (int polls = 0; was_aborted; polls++) {
            engine e(m, n_slots, n_slots);
            int    left = polls;
            ggml_backend_cpu_set_abort_callback(
                e.compute_on.backend, [](void * data) { return --*(int *) data < 0; }, &left);
            layer_graph graph(m.shape, input);
            graph.set_cached(m.index, 0);
            was_aborted = e.executor.compute(graph.graph, e.inner, &e.cpu_graph).is_aborted();
            ggml_backend_cpu_set_abort_callback(e.compute_on.backend, nullptr, nullptr);
            CHECK(e.compute(m, input) == expected);
        }
    }
}

TEST_CASE("the cache: a prefetched residual waits for its low version, and both stay or go together") {
    const model_on_disk m = model_on_disk::with_residual(quantized());
    engine              e(m, 2, 3);
    CHECK_FALSE(e.cache.prefetch({ 1, 0 }, term_id::high, ALL)); // no low version
    CHECK(e.cache.prefetch({ 1, 0 }, term_id::low, ALL));
    CHECK(e.cache.prefetch({ 1, 0 }, term_id::high, ALL));
    CHECK(e.cache.holds({ 1, 0 }, tier_id::high, ALL));
    REQUIRE(e.cache.acquire({ 1, 0 }, tier_id::high));
    CHECK(e.cache.wait({ 1, 0 }, tier_id::high, ALL).ok());
    CHECK(e.counters.bytes_read == e.counters.bytes_prefetched);
    e.cache.release({ 1, 0 }, tier_id::high);
    e.cache.end_prefetch(1);
    for (const uint32_t expert : { 1u, 2u, 3u }) {
        REQUIRE(e.cache.acquire({ 1, expert }, tier_id::low));
        e.cache.release({ 1, expert }, tier_id::low);
    }
    CHECK_FALSE(e.cache.holds({ 1, 0 }, tier_id::low, {}));
    CHECK_FALSE(e.cache.holds({ 1, 0 }, tier_id::high, {}));
    CHECK(e.counters.evictions == 2);
    REQUIRE(e.cache.acquire({ 1, 0 }, tier_id::low)); // alone: its residual was forgotten
    CHECK_FALSE(e.cache.holds({ 1, 0 }, tier_id::high, {}));
    e.cache.release({ 1, 0 }, tier_id::low);
}
