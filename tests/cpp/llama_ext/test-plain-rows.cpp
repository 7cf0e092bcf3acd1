// SPDX-License-Identifier: MIT
#include "../../llama_ext/cpu/plain-rows.h"

#include "fixtures/cpu-graph.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

extern __attribute__((weak)) const plain_kernel q8_0_kernel; // null where the processor lacks instructions

using bytes = std::vector<uint8_t>;

static constexpr ggml_type TYPE       = GGML_TYPE_Q8_0;
static constexpr size_t    BLOCK_SIZE = 34; // a half float and 32 values

// True if the processor has the instructions with which this program's kernel is compiled.
static bool has_kernel() {
    ggml_cpu_init();
#ifdef HOBBIT_TEST_AVX_VNNI
    return ggml_cpu_has_avx_vnni();
#else
    return &q8_0_kernel != nullptr;
#endif
}

// Rows of blocks, `stride` bytes apart, of the given values and of random scales.
static bytes rows_of(int64_t n, int64_t n_rows, size_t stride, unsigned seed,
                     const std::function<int(unsigned)> & value) {
    std::mt19937 random(seed);
    bytes        rows(stride * size_t(n_rows));
    for (int64_t row = 0; row < n_rows; row++) {
        for (int64_t b = 0; b < n / 32; b++) {
            uint8_t *         block = rows.data() + size_t(row) * stride + size_t(b) * BLOCK_SIZE;
            const ggml_fp16_t d     = ggml_fp32_to_fp16(float(random() % 1000) / 700.0F);
            std::memcpy(block, &d, sizeof(d));
            for (int i = 0; i < 32; i++) {
                block[2 + i] = uint8_t(value(random()));
            }
        }
    }
    return rows;
}

static void set_scale(bytes & rows, size_t block, uint16_t half) {
    std::memcpy(rows.data() + block * BLOCK_SIZE, &half, sizeof(half));
}

// Products as ggml has them for one row of activations: those of the first row, then those of the next.
static floats products(int64_t n, const uint8_t * x, size_t bx, int64_t nc, const uint8_t * y, int64_t nr) {
    floats out(size_t(nc * nr));
    for (int64_t i = 0; i < nc * nr; i++) {
        const uint8_t * row = y + size_t(i / nc) * ggml_row_size(TYPE, n);
        ggml_get_type_traits_cpu(TYPE)->vec_dot(int(n), &out[size_t(i)], 0, x + size_t(i % nc) * bx, 0, row, 0, 1);
    }
    return out;
}

// Rows of weights are longer than n, and what follows a row of products must stay.
static void check_kernel(int64_t n, const bytes & x, size_t bx, int64_t nc, const bytes & y, int nr) {
    constexpr float           untouched = -1234.5F;
    floats                    padded(size_t((nc + 1) * nr), untouched), found;
    std::vector<float *>      s;
    std::vector<const void *> rows;
    for (int i = 0; i < nr; i++) {
        s.push_back(padded.data() + i * (nc + 1));
        rows.push_back(y.data() + size_t(i) * ggml_row_size(TYPE, n));
    }
    q8_0_kernel.multiply(n, s.data(), reinterpret_cast<const char *>(x.data()), bx, rows.data(), nr, nc);
    for (int i = 0; i < nr; i++) {
        found.insert(found.end(), s[size_t(i)], s[size_t(i)] + nc);
        REQUIRE(s[size_t(i)][nc] == untouched);
    }
    CAPTURE(n);
    CAPTURE(nc);
    CAPTURE(nr);
    REQUIRE(equal_bits(found, products(n, x.data(), bx, nc, y.data(), nr)));
}

static int any(unsigned random) {
    return int(random % 256) - 128;
}

static int quantized(unsigned random) {
    return int(random % 255) - 127;
}

TEST_CASE("the kernel has the bits of ggml's, for each number of rows") {
    if (!has_kernel()) {
        return;
    }
    for (const int64_t n : { 32, 544, 1024 }) { // one block; one more than are rearranged at once; twice as many
        const size_t bx = ggml_row_size(TYPE, n) + 2 * BLOCK_SIZE;
        for (const int64_t nc : { 1, 7, 8, 16, 37 }) {
            for (int nr = 1; nr <= PLAIN_ROWS; nr++) {
                check_kernel(n, rows_of(n, nc, bx, 1, any), bx, nc, rows_of(n, nr, bx - 2 * BLOCK_SIZE, 2, quantized),
                             nr);
            }
        }
    }
}

TEST_CASE("the kernel has the bits of ggml's for the largest values") {
    if (!has_kernel()) {
        return;
    }
    const int64_t n  = 64;
    const size_t  bx = ggml_row_size(TYPE, n);
    for (const int x : { -128, -127, 0, 127 }) {
        for (const int y : { -127, 0, 127 }) {
            check_kernel(n, rows_of(n, 17, bx, 1, [&](unsigned) { return x; }), bx, 17,
                         rows_of(n, 3, bx, 2, [&](unsigned) { return y; }), 3);
        }
        const auto either = [](unsigned random) { return random % 2 == 0 ? -127 : 127; };
        check_kernel(n, rows_of(n, 17, bx, 1, [&](unsigned) { return x; }), bx, 17, rows_of(n, 5, bx, 2, either), 5);
    }
}

TEST_CASE("the kernel has the bits of ggml's where scales are zero, tiny or infinite") {
    if (!has_kernel()) {
        return;
    }
    const int64_t n  = 96;
    const size_t  bx = ggml_row_size(TYPE, n);
    for (const uint16_t half : { 0x0000, 0x8000, 0x0001, 0x7bff, 0xfbff, 0x7c00, 0xfc00 }) {
        bytes x = rows_of(n, 18, bx, 1, any), y = rows_of(n, 5, bx, 2, quantized);
        set_scale(x, 4, half);
        check_kernel(n, x, bx, 18, y, 5);
        set_scale(y, 7, half);
        check_kernel(n, x, bx, 18, y, 5);
    }
}

TEST_CASE("rows of which few fit at once have the bits, too") {
    if (!has_kernel()) {
        return;
    }
    for (const int64_t n : { 14336, 65568, 131072 }) { // nine, one and one
        const size_t bx = ggml_row_size(TYPE, n);
        CHECK(n <= q8_0_kernel.most_columns);
        check_kernel(n, rows_of(n, 9, bx, 1, any), bx, 9, rows_of(n, 20, bx, 2, quantized), 20);
    }
}

// ---- through ggml's graph

class product {
  public:
    product() : ctx(ggml_init({ size_t(64) << 20, nullptr, false })) {}

    ggml_tensor * weights(int64_t n, int64_t n_rows, int64_t n_matrices) {
        ggml_tensor * t    = ggml_new_tensor_3d(ctx.get(), TYPE, n, n_rows, n_matrices);
        const bytes   rows = rows_of(n, n_rows * n_matrices, ggml_row_size(TYPE, n), 1, any);
        std::copy(rows.begin(), rows.end(), static_cast<uint8_t *>(t->data));
        return t;
    }

    ggml_tensor * tokens(int64_t n, int64_t n_1, int64_t n_2) {
        ggml_tensor * t      = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n, n_1, n_2);
        const floats  values = random_floats(ggml_nelements(t), 2);
        std::copy(values.begin(), values.end(), static_cast<float *>(t->data));
        return t;
    }

    ggml_context_ptr ctx;
};

// Products of one token, the row `row` of x, and the matrix `m` of w.
static floats expected(const ggml_tensor * w, int64_t m, const ggml_tensor * x, int64_t row) {
    bytes y(ggml_row_size(TYPE, x->ne[0]));
    ggml_get_type_traits_cpu(TYPE)->from_float(static_cast<const float *>(x->data) + row * x->ne[0], y.data(),
                                               x->ne[0]);
    const auto * matrix = static_cast<const uint8_t *>(w->data) + size_t(m) * w->nb[2];
    return products(w->ne[0], matrix, w->nb[1], w->ne[1], y.data(), 1);
}

TEST_CASE("tokens of a product get the bits of each alone") {
    if (!has_kernel()) {
        return;
    }
    std::vector<int64_t> numbers = { 512 };
    for (int64_t i = 1; i <= 40; i++) {
        numbers.push_back(i);
    }
    for (const int64_t n_tokens : numbers) {
        for (const int64_t n_rows : { 5, 300 }) { // the second has chunks of several sizes
            CAPTURE(n_tokens);
            CAPTURE(n_rows);
            product       p;
            ggml_tensor * w   = p.weights(160, n_rows, 1);
            ggml_tensor * x   = p.tokens(160, n_tokens, 1);
            const floats  out = floats_on_cpu(p.ctx.get(), ggml_mul_mat(p.ctx.get(), w, x), 1 + int(n_tokens % 3));
            floats        alone;
            for (int64_t i = 0; i < n_tokens; i++) {
                const floats one = expected(w, 0, x, i);
                alone.insert(alone.end(), one.begin(), one.end());
            }
            REQUIRE(equal_bits(out, alone));
        }
    }
}

TEST_CASE("matrices that several heads share get the bits of each alone") {
    if (!has_kernel()) {
        return;
    }
    for (const int64_t n_tokens : { 1, 2, 19 }) {
        product       p;
        ggml_tensor * w   = p.weights(64, 50, 3);
        ggml_tensor * x   = p.tokens(64, n_tokens, 6);
        const floats  out = floats_on_cpu(p.ctx.get(), ggml_mul_mat(p.ctx.get(), w, x), 2);
        floats        alone;
        for (int64_t i = 0; i < 6 * n_tokens; i++) {
            const floats one = expected(w, i / n_tokens / 2, x, i);
            alone.insert(alone.end(), one.begin(), one.end());
        }
        REQUIRE(equal_bits(out, alone));
    }
}

TEST_CASE("tokens of experts that are chosen unevenly get the bits of each alone") {
    if (!has_kernel()) {
        return;
    }
    for (const int64_t n_tokens : { 1, 2, 3, 8, 40, 150 }) {
        for (const int64_t n_x : { 1, 2 }) { // one row of activations for both experts of a token, or one for each
            CAPTURE(n_tokens);
            product       p;
            ggml_tensor * w   = p.weights(96, 130, 5);
            ggml_tensor * x   = p.tokens(96, n_x, n_tokens);
            ggml_tensor * ids = ggml_new_tensor_2d(p.ctx.get(), GGML_TYPE_I32, 2, n_tokens);
            auto *        id  = static_cast<int32_t *>(ids->data);
            for (int32_t i = 0; i < n_tokens; i++) { // the first has all, others few, the last none
                id[2 * i]     = 0;
                id[2 * i + 1] = i % 7 == 0 ? 1 : i % 3 == 0 ? 2 : 3;
            }
            const floats out = floats_on_cpu(p.ctx.get(), ggml_mul_mat_id(p.ctx.get(), w, x, ids), 2);
            floats       alone;
            for (int64_t i = 0; i < 2 * n_tokens; i++) {
                const floats one = expected(w, id[i], x, n_x == 1 ? i / 2 : i);
                alone.insert(alone.end(), one.begin(), one.end());
            }
            REQUIRE(equal_bits(out, alone));
        }
    }
}
