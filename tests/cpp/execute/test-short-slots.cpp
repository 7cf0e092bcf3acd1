// SPDX-License-Identifier: MIT
//
// Layers that need more experts than the pool has slots.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"

static moe_model shaped(bool fused, bool apart) {
    moe_model m = model_on_disk::small();
    m.fused     = fused;
    m.apart     = apart;
    return m;
}

// Bytes of all parts of all experts of a layer, as they are read.
static uint64_t layer_bytes(const model_on_disk & m) {
    uint64_t bytes = 0;
    for (const part_id part : part_set::all()) {
        for (uint32_t e = 0; (m.index.layer(0).parts & part) && e < m.index.layer(0).n_experts; e++) {
            bytes += aligned_span(m.index.locate(tier_id::high, 0, part, e));
        }
    }
    return bytes;
}

TEST_CASE("every part is read once, in one, two or three stages, and the output is stock's") {
    for (const bool fused : { false, true }) {
        for (const bool apart : { false, true }) {
            const model_on_disk m(shaped(fused, apart));
            const layer_input   input    = random_input(m.shape, 37, 3); // all experts
            const rows          expected = stock(m, input, tier_id::high);
            for (const uint32_t n_slots : { 1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u }) {
                CAPTURE(fused);
                CAPTURE(apart);
                CAPTURE(n_slots);
                engine e(m, n_slots, 0);
                CHECK(e.compute(m, input) == expected);
                CHECK(e.counters.bytes_read == layer_bytes(m));
                CHECK((e.counters.waves > e.counters.layers_computed) == (n_slots < 8));
            }
        }
    }
}

TEST_CASE("the same layer again reads no more than what has lost its slot") {
    const model_on_disk m(shaped(false, true));
    const layer_input   input = random_input(m.shape, 37, 3);
    engine              e(m, 8, 0);
    const rows          expected = stock(m, input, tier_id::high);
    CHECK(e.compute(m, input) == expected);
    CHECK(e.compute(m, input) == expected);
    CHECK(e.counters.bytes_read == layer_bytes(m));
}

TEST_CASE("many slots: a matmul's work memory is bounded, and the output is stock's") {
    // experts far apart in a large pool; rows enough that one operation over all of them is too much
    moe_model shape = model_on_disk::small();
    shape.n_layers  = 1;
    shape.n_experts = 256;
    const model_on_disk m(shape);
    const layer_input   input = random_input(m.shape, 2100, 9);
    REQUIRE(inner_graph::work_size(256, 2100 * 2) > inner_graph::max_work_size);
    engine e(m, 256, 0);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.waves == 1);
}

TEST_CASE("thresholds of a sequence need router weights as those of the model do") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 1);
    engine              e(m, 8, 8);
    const int32_t       sequence = 4;
    const int32_t       position = 0;
    const int8_t        output   = 1;
    batch_info          batch;
    batch.begin(1, &sequence, &position, &output);
    e.run.thresholds.set(4, numbers(0.5, 0.8));
    e.run.batch = batch;
    layer_graph graph(m.shape, input);
    graph.set_cached(m.index, 0, /* with_router_weights = */ false);
    CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message().find("run this model with t1 = 1") !=
          std::string::npos);
}
