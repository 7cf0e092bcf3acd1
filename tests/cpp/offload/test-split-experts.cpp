// SPDX-License-Identifier: MIT
//
// Experts that the CPU and a device compute together, against the same layers on the CPU with plain tensors. The device
// is the CPU behind ggml's RPC server: who computes a row does not change a bit of it.
#include "fixtures/executor-fixture.h"
#include "fixtures/rpc-device.h"

#include <atomic>
#include <chrono>
#include <thread>

static constexpr part_set DOWN = part_id::down;

// Which splits an expert of the tier that it misses alone, and of two one: to begin with, the last product takes as
// long to bring as the others take the CPU.
static engine splitting(const model_on_disk & m, uint32_t n_high, uint32_t n_low = 0, score_thresholds thresholds = {},
                        tier_id tier = tier_id::high, uint32_t host_slots = 16) {
    const expert_shapes kinds(m.index);
    const double        transfer = 4e-4 / double(kinds.all()[kinds.of({ 0, 0 }, tier)].bytes());
    return { m,       n_high,  n_low, { { thresholds } }, { rpc_device() }, host_slots, compute_mode::automatic,
             nullptr, transfer };
}

// A token that needs one expert alone.
static moe_model one_used() {
    moe_model m = model_on_disk::small();
    m.n_used    = 1;
    return m;
}

// Loads the expert of layer 0, whole.
static void load(const model_on_disk & m, expert_cache & cache, uint32_t expert) {
    const part_set parts = m.index.layer(0).parts;
    REQUIRE(cache.acquire({ 0, expert }, tier_id::high));
    cache.request({ 0, expert }, tier_id::high, parts);
    REQUIRE(cache.wait({ 0, expert }, tier_id::high, parts).ok());
    cache.release({ 0, expert }, tier_id::high);
}

static layer_input input_for(const moe_model & shape, int32_t expert) {
    layer_input input = random_input(shape, 1, 1);
    input.ids         = { expert };
    return input;
}

TEST_CASE("an expert that CPU and device compute together is what the device would make of it") {
    const model_on_disk m;
    for (const uint32_t n_slots : { 16u, 3u, 1u }) {
        for (const int64_t n_tokens : { 1, 2, 37, 100 }) {
            CAPTURE(n_slots);
            CAPTURE(n_tokens);
            const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
            engine            e     = splitting(m, n_slots);
            CHECK(e.compute(m, input, 0, true) == stock(m, input, tier_id::high, 0, true));
            CHECK((e.counters.selections_split > 0 || n_tokens > 1));
            CHECK(e.counters.selections_split <= e.counters.selections_cpu);
            for (unsigned i = 0; i < 10; i++) { // what was split may be there in part
                const layer_input other = random_input(m.shape, n_tokens, i);
                CHECK(e.compute(m, other, layer_id(i % 2)) == stock(m, other, tier_id::high, layer_id(i % 2)));
            }
        }
    }
}

TEST_CASE("an expert may be split in low precision, and beside one that is skipped") {
    const model_on_disk m;
    const layer_input   input = random_input(m.shape, 1, 7);
    engine              low   = splitting(m, 8, 3, { 0.0, 1.0 }, tier_id::low);
    engine              low_on_cpu(m, 8, 3, score_thresholds{ 0.0, 1.0 });
    CHECK(low.compute(m, input) == low_on_cpu.compute(m, input));
    CHECK(low.counters.selections_split > 0);

    engine less = splitting(m, 8, 3, { 0.3, 0.6 });
    engine less_on_cpu(m, 8, 3, score_thresholds{ 0.3, 0.6 });
    for (unsigned i = 0; i < 10; i++) {
        const layer_input other = random_input(m.shape, 1 + i % 3, i);
        CHECK(less.compute(m, other, layer_id(i % 2), true) == less_on_cpu.compute(m, other, layer_id(i % 2), true));
    }
    CHECK(less.counters.selections_skipped > 0);
}

TEST_CASE("an expert may be the sum of two") {
    const model_on_disk m     = model_on_disk::with_residual();
    const layer_input   input = random_input(m.shape, 1, 7);
    engine              e     = splitting(m, 3, 3);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.selections_split > 0);
}

// Gate and up in one tensor, in two, or with an operation between them. The pool is full of others, so that nothing is
// brought for later.
TEST_CASE("the last product is all that comes to the device for it") {
    for (const int way : { 0, 1, 2 }) {
        CAPTURE(way);
        moe_model shape = one_used();
        shape.fused     = way == 1;
        shape.apart     = way == 2;
        const model_on_disk m(shape);
        engine              e = splitting(m, 2);
        for (const uint32_t other : { 0, 1 }) {
            load(m, e.cache, other);
        }
        const uint64_t    before = e.counters.bytes_transferred;
        const layer_input input  = input_for(shape, 5);
        CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
        CHECK(e.counters.selections_split == 1);
        CHECK(e.counters.bytes_transferred - before == m.index.locate(term_id::high, 0, part_id::down, 5).size);
    }
}

TEST_CASE("the device waits for the CPU, though it has what the last product is made with") {
    const model_on_disk m(one_used());
    engine              e = splitting(m, 8);
    REQUIRE(e.cache.acquire({ 0, 5 }, tier_id::high));
    e.cache.request({ 0, 5 }, tier_id::high, DOWN);
    REQUIRE(e.cache.wait({ 0, 5 }, tier_id::high, DOWN).ok());
    const layer_input input = input_for(m.shape, 5);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.selections_split == 1);
    e.cache.release({ 0, 5 }, tier_id::high);
}

TEST_CASE("the last product is on its way while the CPU computes the others") {
    const model_on_disk   m(one_used());
    engine                e     = splitting(m, 8);
    const part_location & down  = m.index.locate(term_id::high, 0, part_id::down, 5);
    const part_location & other = m.index.locate(term_id::high, 0, part_id::gate, 5);
    std::atomic<bool>     down_was_asked_for{ false };
    bool                  in_time = false;
    e.reader.before               = [&](uint64_t offset, size_t size) {
        const auto is_for = [&](const part_location & at) { return offset <= at.offset && at.offset < offset + size; };
        if (is_for(down)) {
            down_was_asked_for = true;
        } else if (is_for(other)) { // the CPU waits for it
            for (int i = 0; i < 5000 && !down_was_asked_for; i++) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
            in_time = down_was_asked_for;
        }
    };
    const layer_input input = input_for(m.shape, 5);
    CHECK(e.compute(m, input) == stock(m, input, tier_id::high));
    CHECK(e.counters.selections_split == 1);
    CHECK(in_time);
}

TEST_CASE("what of a split expert is not there comes afterwards") {
    const model_on_disk m(one_used());
    engine              e     = splitting(m, 8);
    const layer_input   input = input_for(m.shape, 5);
    const rows          first = e.compute(m, input);
    const part_set      parts = m.index.layer(0).parts;
    CHECK(e.counters.selections_split == 1);
    REQUIRE(e.cache.holds({ 0, 5 }, tier_id::high, parts)); // there, or on the way
    for (int i = 0; i < 5000 && !e.cache.arrived({ 0, 5 }, tier_id::high, parts); i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(e.compute(m, input) == first);
    CHECK(e.counters.hits[tier_id::high] == 1);
}

TEST_CASE("where the last product is in another graph no expert is split, and from then on none is meant to be") {
    const model_on_disk m(one_used());
    engine              e = splitting(m, 8);
    for (const int32_t expert : { 5, 6 }) {
        load(m, *e.host, uint32_t(expert)); // a layer that reads from the disk is not measured
        const layer_input input = input_for(m.shape, expert);
        CHECK(compute_node_by_node(e, m, input, true) == stock(m, input, tier_id::high, 0, true));
        CHECK(e.counters.selections_split == 0);
        CHECK(e.counters.selections_cpu > 0);
        // what went as it was placed
        CHECK((e.counters.layers_predicted > 0) == (expert == 6));
    }
}

TEST_CASE("an error of reading ends the computation, and nothing stays pinned") {
    const model_on_disk m(one_used());
    for (const int n_reads : { 0, 1, 2 }) {
        CAPTURE(n_reads);
        engine e            = splitting(m, 4, 0, {}, tier_id::high, 1);
        e.reader.reads_left = n_reads;
        layer_graph graph(m.shape, input_for(m.shape, 5), false, 1, ggml_backend_dev_buffer_type(e.place.device));
        graph.set_cached(m.index, 0);
        for (int i = 0; i < 2; i++) {
            CHECK(e.executor.compute(graph.graph, e.inner, &e.cpu_graph).message() == "the disk is gone");
        }
        bool is_free = false; // the only slot, when the device's cache has seen that nothing comes any more
        for (int i = 0; i < 5000 && !is_free; i++) {
            REQUIRE(e.cache.acquire({ 0, 1 }, tier_id::high));
            e.cache.release({ 0, 1 }, tier_id::high);
            is_free = e.host->acquire({ 0, 1 }, tier_id::high);
            std::this_thread::sleep_for(std::chrono::milliseconds(is_free ? 0 : 1));
        }
        CHECK(is_free);
    }
}
