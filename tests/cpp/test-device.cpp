// SPDX-License-Identifier: MIT
//
// Layers computed with pools on a device that has memory of its own, against the same layers on the CPU with plain
// tensors.
#include "executor-fixture.h"
#include "rpc-device.h"

#include <string>

static ggml_backend_dev_t device() {
    return rpc_device();
}

static moe_executor::config with(score_thresholds thresholds) {
    return { { thresholds }, false };
}

TEST_CASE("everything high, whatever the batch and the pool, layers taking turns") {
    const model_on_disk m;
    for (const uint32_t n_slots : { 16u, 3u, 1u }) { // all layers, less than a batch, less than a token
        engine e(m, n_slots, 0, with({}), { device() });
        for (const int64_t n_tokens : { 1, 2, 37 }) {
            for (uint32_t layer = 0; layer < 2; layer++) {
                CAPTURE(n_slots);
                CAPTURE(n_tokens);
                const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
                CHECK(e.compute(m, input, layer) == stock(m, input, TIER_HIGH, layer));
            }
        }
    }
}

TEST_CASE("the same experts give the same output, whether they were there or not") {
    const model_on_disk m;
    engine              e(m, 8, 0, with({}), { device() });
    const layer_input   input = random_input(m.shape, 2, 5);
    const rows          first = e.compute(m, input);
    const uint64_t      read  = e.counters.bytes_read;
    CHECK(e.compute(m, input) == first);
    CHECK(e.counters.bytes_read == read);
}

TEST_CASE("low precision, and a residual added to it") {
    const layer_input   input = random_input(model_on_disk::small(), 5, 7);
    const model_on_disk m;
    engine              low(m, 8, 3, with({ 0.0, 1.0 }), { device() });
    engine              on_cpu(m, 8, 3, score_thresholds{ 0.0, 1.0 });
    CHECK(low.compute(m, input) == on_cpu.compute(m, input));
    CHECK(low.counters.selections[TIER_LOW] > 0);
    for (const uint32_t n_slots : { 8u, 2u }) {
        CAPTURE(n_slots);
        const model_on_disk sums = model_on_disk::with_residual();
        engine              e(sums, n_slots, n_slots, with({}), { device() });
        CHECK(e.compute(sums, input) == stock(sums, input, TIER_HIGH));
    }
}

TEST_CASE("what is skipped is zero, with a bias too") {
    moe_model shape = model_on_disk::small();
    shape.n_used    = 4;
    const model_on_disk m(shape);
    const layer_input   input = random_input(shape, 1, 11);
    engine              e(m, 8, 8, with({ 0.3, 0.6 }), { device() });
    const rows          out    = e.compute(m, input, 0, true);
    size_t              zeroes = 0;
    for (const auto & row : out) {
        zeroes += row == std::vector<float>(row.size(), 0.0f);
    }
    CHECK(e.counters.selections_skipped > 0);
    CHECK(zeroes == e.counters.selections_skipped);
}

TEST_CASE("experts of one tier may have types of their own") {
    const moe_model     shape = model_on_disk::small();
    const model_on_disk m     = model_on_disk::with_mixed_types();
    engine              on_cpu(m, 8, 2, score_thresholds{ 0.0, 1.0 });
    engine              e(m, 8, 2, with({ 0.0, 1.0 }), { device() });
    for (const int64_t n_tokens : { 1, 21 }) {
        CAPTURE(n_tokens);
        const layer_input input = random_input(shape, n_tokens, 17);
        CHECK(e.compute(m, input) == on_cpu.compute(m, input));
    }
}

TEST_CASE("a pool that the device has no room for is an error that says what to do") {
    slot_pool    pool;
    const status s = pool.allocate(ggml_backend_dev_buffer_type(device()), nullptr, size_t(1) << 58, 4096, 4096,
                                   "--pools or --device-memory");
    REQUIRE_FALSE(s.ok());
    CHECK(s.message().find("--device-memory") != std::string::npos);
}
