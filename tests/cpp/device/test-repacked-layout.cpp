// SPDX-License-Identifier: MIT
#include "device/device-traits.h"

#include "fixtures/executor-fixture.h"
#include "fixtures/numbers.h"

#include <vector>

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static constexpr matrix_shape SHAPE     = { 256, 80 }; // five row groups
static constexpr uint32_t     N_EXPERTS = 4;

static const ggml_type TYPES[] = { GGML_TYPE_Q4_0,   GGML_TYPE_Q8_0,  GGML_TYPE_Q2_K, GGML_TYPE_Q4_K,
                                   GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q6_K };

static std::vector<char> random_rows(ggml_type type, const matrix_shape & shape) {
    std::mt19937       random(7);
    std::vector<float> values(size_t(shape.n_in * shape.n_out));
    for (float & v : values) {
        v = float(random() % 2001) / 1000.0f - 1.0f;
    }
    std::vector<char> bytes(ggml_row_size(type, shape.n_in) * size_t(shape.n_out));
    ggml_quantize_chunk(type, values.data(), bytes.data(), 0, shape.n_out, shape.n_in, nullptr);
    return bytes;
}

// Converts `src`, `n_rows` at a time.
static std::vector<char> packed(ggml_backend_buffer_type_t layout, ggml_type type, const std::vector<char> & src,
                                int64_t n_rows) {
    ggml_backend_buffer_t buffer   = ggml_backend_buft_alloc_buffer(layout, src.size());
    char *                base     = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
    const size_t          row_size = ggml_row_size(type, SHAPE.n_in);
    for (int64_t row = 0; row < SHAPE.n_out; row += n_rows) {
        const matrix_shape piece = { SHAPE.n_in, std::min(n_rows, SHAPE.n_out - row) };
        set_rows(buffer, type, piece, src.data() + size_t(row) * row_size, base + size_t(row) * row_size);
    }
    std::vector<char> result(base, base + src.size());
    ggml_backend_buffer_free(buffer);
    return result;
}

// ggml's own layout, which ours has the bits of.
static ggml_backend_buffer_type_t repacked() {
    return extra_type(cpu_device(), "CPU_REPACK");
}

TEST_CASE("a buffer type is chosen where ggml has a layout, and converts in pieces as in one") {
    size_t n_packed = 0;
    for (const ggml_type type : TYPES) {
        CAPTURE(ggml_type_name(type));
        if (!packed_layout(cpu_device(), type, SHAPE, N_EXPERTS)) {
            continue;
        }
        n_packed++;
        const ggml_backend_buffer_type_t layout = repacked();
        const std::vector<char>          src    = random_rows(type, SHAPE);
        const std::vector<char>          whole  = packed(layout, type, src, SHAPE.n_out);
        CHECK(whole != src);
        CHECK(packed(layout, type, src, 16) == whole);
        CHECK(packed(layout, type, src, 48) == whole);
    }
    if (HOBBIT_TEST_REPACK && (ggml_cpu_has_avx2() || ggml_cpu_has_dotprod())) {
        CHECK(n_packed > 0);
    }
    if (!HOBBIT_TEST_REPACK) {
        CHECK(n_packed == 0);
    }
}

TEST_CASE("floats, and rows that make no whole groups, stay as in the file") {
    CHECK(packed_layout(cpu_device(), GGML_TYPE_F16, SHAPE, N_EXPERTS) == nullptr);
    CHECK(packed_layout(cpu_device(), GGML_TYPE_F32, SHAPE, N_EXPERTS) == nullptr);
    CHECK(packed_layout(cpu_device(), GGML_TYPE_Q4_0, { 256, 81 }, N_EXPERTS) == nullptr);
}

TEST_CASE("a chunk holds whole row groups, one at least") {
    CHECK(rows_per_chunk(512 * 1024, 1152) == 448);
    CHECK(rows_per_chunk(1, 1152) == 16);
    for (const size_t row_size : { size_t(18), size_t(1152), size_t(100000) }) {
        CHECK(rows_per_chunk(512 * 1024, row_size) % 16 == 0);
    }
}

static moe_model quantized(ggml_type high, ggml_type low) {
    moe_model m;
    m.n_experts = 8;
    m.n_embd    = 256;
    m.n_ff      = 768;
    m.high      = high;
    m.low       = low;
    return m;
}

TEST_CASE("experts in the device's layout give what stock gives with weights in that layout") {
    const model_on_disk              m(quantized(GGML_TYPE_Q4_0, GGML_TYPE_Q8_0));
    const ggml_backend_buffer_type_t layout = packed_layout(cpu_device(), GGML_TYPE_Q4_0, { 256, 768 }, 8);
    const ggml_backend_buffer_type_t buft   = layout ? repacked() : ggml_backend_cpu_buffer_type();
    for (const int64_t n_tokens : { 1, 3, 37 }) {
        for (const uint32_t n_slots : { 16u, 3u, 1u }) {
            CAPTURE(n_tokens);
            CAPTURE(n_slots);
            const layer_input input = random_input(m.shape, n_tokens, unsigned(n_tokens));
            engine            e(m, n_slots, 0, rules{ {} }, { cpu_device(), true });
            const rows        expected = stock(m, input, tier_id::high, 0, false, buft);
            CHECK(e.compute(m, input) == expected);
            CHECK(e.compute(m, input) == expected);
            CHECK((expected != stock(m, input, tier_id::high)) == (layout != nullptr));
        }
    }
}

TEST_CASE("a tier whose type has no layout stays as it is, beside one that has") {
    const model_on_disk m(quantized(GGML_TYPE_F16, GGML_TYPE_Q4_0));
    const layer_input   input = random_input(m.shape, 1, 1);
    // all but the best are low
    const rules                      config = { numbers(0.0, 1.0), true };
    engine                           e(m, 8, 8, config, { cpu_device(), true });
    const ggml_backend_buffer_type_t layout = packed_layout(cpu_device(), GGML_TYPE_Q4_0, { 256, 768 }, 8);
    const rows                       high   = stock(m, input, tier_id::high);
    const rows   low  = stock(m, input, tier_id::low, 0, false, layout ? repacked() : ggml_backend_cpu_buffer_type());
    const rows   out  = e.compute(m, input);
    const size_t best = input.weights[0] >= input.weights[1] ? 0 : 1;
    CHECK(out[best] == high[best]);
    CHECK(out[1 - best] == low[1 - best]);
}
