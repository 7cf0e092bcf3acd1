// SPDX-License-Identifier: MIT
//
// Layers that a device and the CPU compute together, against the same layers on the CPU with plain tensors. The device
// is the CPU behind ggml's RPC server: who computes a row does not change a bit of it.
#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"
#include "fixtures/rpc-device.h"

#include <array>
#include <chrono>
#include <thread>

// An engine whose host memory has room for all experts.
static engine cooperative(const model_on_disk & m, uint32_t n_high, uint32_t n_low = 0, rule_numbers thresholds = {},
                          compute_mode mode = compute_mode::cooperative, uint32_t host_slots = 16) {
    return { m, n_high, n_low, rules{ thresholds }, { rpc_device() }, host_slots, mode };
}

static uint64_t n_selections(const engine & e) {
    return e.counters.selections[tier_id::high] + e.counters.selections[tier_id::low];
}

TEST_CASE("what the CPU computes of a layer is what the device would, whatever the batch and the pool") {
    const model_on_disk m;
    for (const uint32_t n_slots : { 16u, 3u, 1u }) {
        engine e = cooperative(m, n_slots);
        for (const int64_t n_tokens : { 1, 2, 16, 17, 100 }) {
            for (layer_id layer = 0; layer < 2; layer++) {
                CAPTURE(n_slots);
                CAPTURE(n_tokens);
                const layer_input input  = random_input(m.shape, n_tokens, unsigned(n_tokens));
                const uint64_t    before = e.counters.selections_cpu;
                CHECK(e.compute(m, input, layer) == stock(m, input, tier_id::high, layer));
                if (n_slots < 16) { // a prompt is left to the device
                    CHECK((e.counters.selections_cpu > before) == (n_tokens <= 16));
                }
            }
        }
        CHECK(e.counters.selections_cpu > 0);
        CHECK(e.counters.cpu_ns > 0);
    }
}

TEST_CASE("modes: the CPU has nothing, what is missing, or what the placement gives it") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 5, 3);
    engine              none  = cooperative(m, 8, 0, {}, compute_mode::gpu);
    engine              all   = cooperative(m, 8, 0, {}, compute_mode::cooperative);
    for (engine * e : { &none, &all }) {
        CHECK(e->compute(m, input) == stock(m, input, tier_id::high));
    }
    CHECK(none.counters.selections_cpu == 0);
    CHECK(all.counters.selections_cpu == n_selections(all));
    CHECK(all.counters.hits[tier_id::high] == 0);

    engine some = cooperative(m, 3, 0, {}, compute_mode::automatic);
    for (unsigned i = 0; i < 100; i++) {
        const layer_input other = random_input(m.shape, 1 + i % 5, i);
        CHECK(some.compute(m, other, layer_id(i % 2)) == stock(m, other, tier_id::high, layer_id(i % 2)));
    }
    CHECK(some.counters.selections_cpu > 0);
    CHECK(some.counters.selections_cpu < n_selections(some));
}

TEST_CASE("what the CPU has computed comes to the device, one expert at a time, and then stays with it") {
    const model_on_disk m;
    engine              e     = cooperative(m, 8);
    const layer_input   input = random_input(m.shape, 1, 9);
    const rows          first = e.compute(m, input);
    CHECK(e.counters.selections_cpu == 2);
    uint64_t before = 0;
    for (int i = 0; i < 10000 && e.counters.selections_cpu != before; i++) {
        before = e.counters.selections_cpu;
        std::this_thread::sleep_for(std::chrono::milliseconds(1)); // a copy is under way
        REQUIRE(e.compute(m, input) == first);
    }
    CHECK(e.counters.selections_cpu == before);
    CHECK(e.counters.bytes_transferred > 0);
}

// Copies: ids, weights and the input are one, the rows and their numbers another.
TEST_CASE("a layer that the CPU computes alone is one launch, one wait, one read and two copies") {
    const model_on_disk m;
    engine              e = cooperative(m, 8);
    e.compute(m, random_input(m.shape, 1, 9));
    CHECK(e.counters.selections_cpu == 2);
    CHECK(e.counters.device_launches == 1);
    CHECK(e.counters.device_waits == 1);
    CHECK(e.counters.device_reads == 1);
    CHECK(e.counters.device_copies == 2);
}

// The counters of what a layer costs: launches, waits, reads, copies.
static std::array<uint64_t, 4> costs(const engine & e) {
    return { e.counters.device_launches, e.counters.device_waits, e.counters.device_reads, e.counters.device_copies };
}

// The device's row is launched before the CPU begins, and the CPU's follows without a wait.
TEST_CASE("a layer of a hit and a miss is two launches, one wait, one read and three copies") {
    const model_on_disk m;
    engine              e       = cooperative(m, 1);
    uint64_t            n_mixed = 0;
    for (unsigned i = 0; i < 100 || n_mixed == 0; i++) { // an upload takes its time
        const layer_input input  = random_input(m.shape, 1, i);
        const uint64_t    on_cpu = e.counters.selections_cpu;
        const auto        before = costs(e);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        const auto after = costs(e);
        if (e.counters.selections_cpu - on_cpu == 1) {
            CHECK(after[0] - before[0] == 2);
            CHECK(after[1] - before[1] == 1);
            CHECK(after[2] - before[2] == 1);
            CHECK(after[3] - before[3] == 3);
            n_mixed++;
        }
    }
}

TEST_CASE("rows that the scratch memory has no room for at once are copied one part after the other") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 8;
    const model_on_disk m(shape);
    for (const compute_mode mode : { compute_mode::cooperative, compute_mode::automatic }) {
        engine e = cooperative(m, 4, 0, {}, mode);
        for (const int64_t n_tokens : { 16, 40 }) { // each expert has 8 rows, and there is room for 64
            const layer_input input = random_input(shape, n_tokens, 3);
            CHECK(e.compute(m, input, 0, true) == stock(m, input, tier_id::high, 0, true));
        }
        CHECK(e.counters.selections_cpu > 64);
    }
}

TEST_CASE("low precision is computed in low precision") {
    const layer_input   input = random_input(model_on_disk::small(), 5, 7);
    const model_on_disk m;
    engine              low = cooperative(m, 8, 3, numbers(0.0, 1.0));
    engine              on_cpu(m, 8, 3, numbers(0.0, 1.0));
    CHECK(low.compute(m, input) == on_cpu.compute(m, input));
    CHECK(low.counters.selections[tier_id::low] > 0);
    CHECK(low.counters.selections_cpu == n_selections(low));
}

TEST_CASE("experts of one tier may have types of their own") {
    const model_on_disk m = model_on_disk::with_mixed_types();
    engine              on_cpu(m, 8, 2, numbers(0.0, 1.0));
    engine              e = cooperative(m, 8, 2, numbers(0.0, 1.0));
    for (const int64_t n_tokens : { 1, 11 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(m.shape, n_tokens, 17);
        CHECK(e.compute(m, input) == on_cpu.compute(m, input));
    }
    CHECK(e.counters.selections_cpu > 0);
}

TEST_CASE("biases are added on the CPU, what is skipped is zero") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    for (const int64_t n_tokens : { 1, 9 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(shape, n_tokens, 11);
        engine            plain = cooperative(m, 4);
        CHECK(plain.compute(m, input, 0, true) == stock(m, input, tier_id::high, 0, true));
        CHECK(plain.counters.selections_cpu > 0);

        engine e = cooperative(m, 4, 4, numbers(0.3, 0.6));
        engine on_cpu(m, 4, 4, numbers(0.3, 0.6));
        CHECK(e.compute(m, input, 0, true) == on_cpu.compute(m, input, 0, true));
        CHECK((e.counters.selections_skipped > 0 || n_tokens > 1));
        CHECK(e.counters.selections_cpu > 0);
    }
}

TEST_CASE("gate and up in one tensor, or with an operation between them") {
    for (const bool fused : { true, false }) {
        CAPTURE(fused);
        moe_model shape = model_on_disk::small();
        shape.fused     = fused;
        shape.apart     = !fused;
        const model_on_disk m(shape);
        engine              e     = cooperative(m, 3);
        const layer_input   input = random_input(shape, 6, 13);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        CHECK(e.counters.selections_cpu > 0);
    }
}

TEST_CASE("experts that host memory has no slot for are computed by the device") {
    const model_on_disk m;
    engine              e = cooperative(m, 4, 0, {}, compute_mode::cooperative, 2);
    for (unsigned i = 0; i < 10; i++) {
        const layer_input input = random_input(m.shape, 7, i);
        CHECK(e.compute(m, input, layer_id(i % 2)) == stock(m, input, tier_id::high, layer_id(i % 2)));
    }
    CHECK(e.counters.selections_cpu > 0);
    CHECK(e.counters.selections_cpu < n_selections(e));
}

TEST_CASE("a layer computed node by node is the layer") {
    const model_on_disk m;
    for (const int64_t n_tokens : { 1, 6 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(m.shape, n_tokens, 23);
        engine            e     = cooperative(m, 3);
        CHECK(compute_node_by_node(e, m, input, true) == stock(m, input, tier_id::high, 0, true));
        CHECK(e.counters.selections_cpu > 0);
    }
}

TEST_CASE("an error of reading ends the computation") {
    const model_on_disk m;
    for (const int n_reads : { 0, 3 }) {
        CAPTURE(n_reads);
        engine e            = cooperative(m, 4);
        e.reader.reads_left = n_reads;
        layer_graph graph(m.shape, random_input(m.shape, 7, 1), false, ggml_backend_dev_buffer_type(e.place.device));
        graph.set_cached(m.index, 0);
        for (int i = 0; i < 2; i++) {
            CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message() == "the disk is gone");
        }
    }
}
