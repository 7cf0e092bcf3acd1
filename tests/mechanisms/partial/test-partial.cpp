// SPDX-License-Identifier: MIT
//
// Tiers that lack experts: these are in the other tier wherever the others are not.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"
#include "fixtures/rpc-device.h"
#include "record/trace.h"

#include <algorithm>
#include <thread>
#include <vector>

static const std::vector<std::vector<int32_t>> PRESENT = { { 1, 4, 6 }, {} };

static model_on_disk partial(const moe_model & m = model_on_disk::small()) {
    return { m, [&](gguf_builder & file) { m.add_low_and_partial(file, PRESENT); } };
}

// Each expert in the best precision that it has, on its own, as a plain model with one expert.
static rows best_of_each(const model_on_disk & m, const layer_input & input) {
    rows expected(input.ids.size());
    for (int32_t id = 0; id < m.shape.n_experts; id++) {
        const tier_id tier       = m.index.has(tier_id::high, { 0, uint32_t(id) }) ? tier_id::high : tier_id::low;
        layer_input   single     = input;
        moe_model     one_expert = m.shape;
        one_expert.n_experts     = 1;
        single.ids.assign(input.ids.size(), 0);
        layer_graph graph(one_expert, single);
        graph.set_plain([&](const std::string & part) {
            const part_id         p  = part == "gate" ? part_id::gate : part == "up" ? part_id::up : part_id::down;
            const part_location & at = m.index.locate(tier, 0, p, uint32_t(id));
            return plain_weight{ at.type, temp_dir::read(m.index.files()[0]).substr(at.offset, at.size) };
        });
        cpu_backend cpu;
        REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
        const rows out = graph.output();
        for (size_t i = 0; i < input.ids.size(); i++) {
            expected[i] = input.ids[i] == id ? out[i] : expected[i];
        }
    }
    return expected;
}

TEST_CASE("everything high is the best version of each expert, whatever the batch and the pools") {
    const model_on_disk m = partial();
    for (const int64_t n_tokens : { 1, 2, 37 }) {
        const layer_input input    = random_input(m.shape, n_tokens, unsigned(n_tokens));
        const rows        expected = best_of_each(m, input);
        uint64_t          n_high   = 0;
        for (const int32_t id : input.ids) {
            n_high += m.index.has(tier_id::high, { 0, uint32_t(id) });
        }
        for (const uint32_t n_slots : { 8u, 2u, 1u }) {
            for (const bool strict : { false, true }) {
                CAPTURE(n_tokens);
                CAPTURE(n_slots);
                engine e(m, std::min(n_slots, 3u), n_slots, rules{ {}, strict });
                CHECK(e.compute(m, input) == expected);
                CHECK(e.compute(m, input) == expected);
                CHECK(e.counters.selections[tier_id::high] == 2 * n_high);
                CHECK(e.counters.selections[tier_id::low] == 2 * (input.ids.size() - n_high));
            }
        }
    }
}

TEST_CASE("where each expert lies once, every rule has the same result") {
    const moe_model                         small    = model_on_disk::small();
    const std::vector<std::vector<int32_t>> ALL_HIGH = { { 0, 1, 2, 3, 4, 5, 6, 7 }, { 2 } };
    for (const auto & in_high : { PRESENT, ALL_HIGH }) {
        const model_on_disk m(small, [&](gguf_builder & file) { small.add_once(file, in_high); });
        for (const int64_t n_tokens : { 1, 37 }) {
            const layer_input input    = random_input(m.shape, n_tokens, unsigned(n_tokens));
            const rows        expected = best_of_each(m, input);
            for (const uint32_t n_slots : { 8u, 2u, 1u }) {
                for (const rule_numbers & given : { rule_numbers(), numbers(0.0, 1.0) }) {
                    engine e(m, n_slots, n_slots, rules{ given });
                    engine on_device(m, n_slots, n_slots, rules{ given }, { rpc_device() }, n_slots);
                    CHECK(e.compute(m, input) == expected);
                    CHECK(on_device.compute(m, input) == expected);
                    CHECK(e.counters.selections[tier_id::high] > 0);
                    CHECK((e.counters.selections[tier_id::low] > 0) == (in_high == PRESENT));
                }
            }
        }
    }
}

TEST_CASE("with repacked weights") {
    moe_model shape           = model_on_disk::small();
    shape.n_embd              = 256;
    shape.n_ff                = 768;
    shape.high                = GGML_TYPE_Q8_0;
    ggml_backend_dev_t  cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const model_on_disk m     = partial(shape);
    const layer_input   input = random_input(m.shape, 9, 5);
    engine              as_in_file(m, 3, 8);
    engine              packed(m, 3, 8, rules{}, { cpu, true });
    const rows          expected = as_in_file.compute(m, input);
    const rows          found    = packed.compute(m, input);
    double              most     = 0.0;
    for (size_t i = 0; i < found.size(); i++) {
        for (size_t j = 0; j < found[i].size(); j++) {
            most = std::max(most, std::abs(double(found[i][j]) - double(expected[i][j])));
        }
    }
    CHECK(most < 1e-2);
}

TEST_CASE("what a file does not have is not read ahead of the first token") {
    const model_on_disk    m = partial();
    engine                 e(m, 3, 8);
    std::vector<expert_id> all;
    for (uint32_t expert = 0; expert < 8; expert++) {
        all.push_back({ 0, expert });
    }
    e.cache.fill(tier_id::high, all);
    for (const uint32_t expert : { 1u, 4u, 6u }) {
        while (!e.cache.arrived({ 0, expert }, tier_id::high, m.index.layer(0).parts)) {
            std::this_thread::yield();
        }
    }
    CHECK_FALSE(e.cache.holds({ 0, 0 }, tier_id::high, {}));
    CHECK_FALSE(e.cache.has_free_slot({ 0, 0 }, tier_id::high));
}

TEST_CASE("a trace names the mean size of the best versions of a layer's experts") {
    const model_on_disk m = partial();
    trace_writer        trace;
    const std::string   path = m.dir.path("trace.csv");
    REQUIRE(trace.open(path, m.index).ok());
    REQUIRE(trace.close().ok());
    const std::string text = temp_dir::read(path);
    const size_t      low  = 3 * 64 * 32 / 32 * 18;
    const size_t      high = 3 * 64 * 32 * 2;
    CHECK(text.find("# layer=0 expert_bytes=" + std::to_string((3 * high + 5 * low) / 8)) != std::string::npos);
    CHECK(text.find("# layer=1 expert_bytes=" + std::to_string(low)) != std::string::npos);
}
