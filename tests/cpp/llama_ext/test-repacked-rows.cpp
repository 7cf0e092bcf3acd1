// SPDX-License-Identifier: MIT
#include "../../patches/ggml-cpu/repacked-rows.h"

#include "device/repacked-layout.h"
#include "fixtures/float-rows.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

static constexpr int64_t N_EXPERTS = 3;

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Weights of experts, or of one matrix, in the layout that the CPU prefers, or in the file's.
class weights {
  public:
    weights(ggml_type type, const hobbit::matrix_shape & shape, int64_t n_matrices) :
        ctx(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true })),
        tensor(ggml_new_tensor_3d(ctx.get(), type, shape.n_in, shape.n_out, n_matrices)) {
        const ggml_backend_buffer_type_t layout = hobbit::packed_layout(cpu_device(), type, shape, N_EXPERTS);
        is_packed                               = layout != nullptr;
        buffer.reset(
            ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), layout ? layout : ggml_backend_cpu_buffer_type()));
        const floats      values = random_floats(ggml_nelements(tensor), 1);
        std::vector<char> bytes(ggml_nbytes(tensor));
        ggml_quantize_chunk(type, values.data(), bytes.data(), 0, shape.n_out * n_matrices, shape.n_in, nullptr);
        ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
    }

    // Products of each token and the matrices that it chose, or, without `chosen`, of each token and the only matrix.
    floats multiply(const floats & tokens, const std::vector<int32_t> & chosen = {}) const {
        const int64_t          n = int64_t(tokens.size()) / tensor->ne[0];
        const ggml_context_ptr work(ggml_init({ size_t(16) << 20, nullptr, false }));
        ggml_tensor *          product;
        ggml_tensor *          x;
        if (chosen.empty()) {
            x       = ggml_new_tensor_2d(work.get(), GGML_TYPE_F32, tensor->ne[0], n);
            product = ggml_mul_mat(work.get(), tensor, x);
        } else {
            x                 = ggml_new_tensor_3d(work.get(), GGML_TYPE_F32, tensor->ne[0], 1, n);
            ggml_tensor * ids = ggml_new_tensor_2d(work.get(), GGML_TYPE_I32, int64_t(chosen.size()) / n, n);
            std::copy(chosen.begin(), chosen.end(), static_cast<int32_t *>(ids->data));
            product = ggml_mul_mat_id(work.get(), tensor, x, ids);
        }
        std::copy(tokens.begin(), tokens.end(), static_cast<float *>(x->data));
        ggml_cgraph * graph = ggml_new_graph(work.get());
        ggml_build_forward_expand(graph, product);
        const ggml_backend_ptr backend(ggml_backend_dev_init(cpu_device(), nullptr));
        ggml_backend_cpu_set_n_threads(backend.get(), 2);
        REQUIRE(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
        const float * out = static_cast<const float *>(product->data);
        return floats(out, out + ggml_nelements(product));
    }

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           tensor;
    bool                    is_packed = false; // only then have several tokens the bits of each alone
};

static const ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_MXFP4, GGML_TYPE_IQ4_NL, GGML_TYPE_Q2_K };

// Each thread gets an odd number of groups of the first's rows, and wide vectors take two. The last has more blocks
// than sums are kept of.
static const hobbit::matrix_shape SHAPES[] = { { 512, 80 }, { 256, 16 }, { 8448, 16 } };

static floats token(const floats & all, int64_t i, int64_t n) {
    return floats(all.begin() + i * n, all.begin() + (i + 1) * n);
}

TEST_CASE("several tokens of an expert get the bits of each alone") {
    for (const ggml_type type : TYPES) {
        for (const hobbit::matrix_shape & shape : SHAPES) {
            const weights experts(type, shape, N_EXPERTS);
            if (!experts.is_packed) {
                continue;
            }
            for (const int64_t n_tokens : { 1, 2, 3, 5, 8, 37, 71 }) {
                CAPTURE(ggml_type_name(type));
                CAPTURE(shape.n_in);
                CAPTURE(n_tokens);
                const floats         tokens = random_floats(shape.n_in * n_tokens, 2);
                std::vector<int32_t> chosen;
                for (int32_t i = 0; i < n_tokens; i++) {
                    chosen.insert(chosen.end(), { 1, i % 3 == 0 ? 0 : 2 });
                }
                const floats together = experts.multiply(tokens, chosen);
                for (int64_t i = 0; i < n_tokens; i++) {
                    const floats alone = experts.multiply(token(tokens, i, shape.n_in), { 1, i % 3 == 0 ? 0 : 2 });
                    REQUIRE(equal_bits(alone, token(together, i, 2 * shape.n_out)));
                }
            }
        }
    }
}

TEST_CASE("tokens that make no group of four for a matrix get the bits of each alone") {
    for (const ggml_type type : TYPES) {
        for (const hobbit::matrix_shape & shape : SHAPES) {
            const weights matrix(type, shape, 1);
            if (!matrix.is_packed) {
                continue;
            }
            for (const int64_t n_tokens : { 2, 3, 6, 7 }) {
                CAPTURE(ggml_type_name(type));
                CAPTURE(shape.n_in);
                CAPTURE(n_tokens);
                const floats tokens   = random_floats(shape.n_in * n_tokens, 2);
                const floats together = matrix.multiply(tokens);
                for (int64_t i = n_tokens - n_tokens % 4; i < n_tokens; i++) {
                    REQUIRE(equal_bits(matrix.multiply(token(tokens, i, shape.n_in)), token(together, i, shape.n_out)));
                }
            }
        }
    }
}

extern "C" {
using quantize_by_four = void(const float * x, void * y, int64_t n);
using multiply_all     = void(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
quantize_by_four ggml_quantize_mat_q8_0_4x8, ggml_quantize_mat_q8_K_4x8;
multiply_all     ggml_gemv_q4_0_8x8_q8_0, ggml_gemv_q4_K_8x8_q8_K, ggml_gemv_mxfp4_8x8_q8_0, ggml_gemv_q2_K_8x8_q8_K,
    ggml_gemv_iq4_nl_8x8_q8_0;
multiply_all ggml_gemm_q4_0_8x8_q8_0, ggml_gemm_q4_K_8x8_q8_K, ggml_gemm_mxfp4_8x8_q8_0, ggml_gemm_q2_K_8x8_q8_K,
    ggml_gemm_iq4_nl_8x8_q8_0;
}

struct kernels {
    ggml_type          type;
    ggml_type          row_type;
    quantize_by_four * quantize;
    multiply_all *     gemv;
    multiply_all *     gemm;
    size_t             group_size; // bytes of eight blocks
    size_t             scale_size; // bytes of scales at the beginning of a group
};

static const kernels KERNELS[] = {
    { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, ggml_quantize_mat_q8_0_4x8, ggml_gemv_q4_0_8x8_q8_0, ggml_gemm_q4_0_8x8_q8_0, 144,
      16 },
    { GGML_TYPE_MXFP4, GGML_TYPE_Q8_0, ggml_quantize_mat_q8_0_4x8, ggml_gemv_mxfp4_8x8_q8_0, ggml_gemm_mxfp4_8x8_q8_0,
      136, 8 },
    { GGML_TYPE_Q4_K, GGML_TYPE_Q8_K, ggml_quantize_mat_q8_K_4x8, ggml_gemv_q4_K_8x8_q8_K, ggml_gemm_q4_K_8x8_q8_K,
      1152, 32 },
    { GGML_TYPE_Q2_K, GGML_TYPE_Q8_K, ggml_quantize_mat_q8_K_4x8, ggml_gemv_q2_K_8x8_q8_K, ggml_gemm_q2_K_8x8_q8_K, 672,
      32 },
    { GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0, ggml_quantize_mat_q8_0_4x8, ggml_gemv_iq4_nl_8x8_q8_0,
      ggml_gemm_iq4_nl_8x8_q8_0, 144, 16 },
};

static bool has_kernel(ggml_type type) {
#ifdef HOBBIT_TEST_AVX2
    const bool has_vnni = false;
#else
    const bool has_vnni = ggml_cpu_has_avx512_vnni() || ggml_cpu_has_avx_vnni();
#endif
    return ggml_cpu_has_avx2() && ggml_cpu_has_fma() && ggml_cpu_has_f16c() && (has_vnni || type != GGML_TYPE_IQ4_NL);
}

// Any bytes are repacked weights, but scales must be finite: halves of 0x3c3c and exponents of 127 in the place of the
// bytes 0x3c and 0x7f.
static std::vector<uint8_t> packed_weights(const kernels & k, int n_groups, int fill) {
    std::mt19937         random(7);
    std::vector<uint8_t> bytes(k.group_size * size_t(n_groups));
    for (size_t i = 0; i < bytes.size(); i++) {
        const bool is_scale = i % k.group_size < k.scale_size;
        bytes[i] = is_scale ? (k.type == GGML_TYPE_MXFP4 ? 0x7f : 0x3c) : fill < 0 ? uint8_t(random()) : uint8_t(fill);
    }
    return bytes;
}

// Rows of equal values are quantized to the largest integers.
static floats extreme_rows(int n, int n_rows) {
    floats rows = random_floats(n * n_rows, 3);
    for (int i = 0; i < 3 * n; i++) {
        rows[size_t(i)] = i < n ? 1.0F : i < 2 * n ? -1.0F : i % 2 == 0 ? 1.0F : -1.0F;
    }
    return rows;
}

static void check_kernels(const kernels & k, int n, int n_rows, int fill) {
    const bool                 has        = has_kernel(k.type);
    constexpr int              n_columns  = 24; // three groups, so that wide vectors have a half of their last
    const int                  block_size = int(ggml_blck_size(k.type));
    const std::vector<uint8_t> w          = packed_weights(k, n / block_size * n_columns / 8, fill);
    const floats               x          = extreme_rows(n, n_rows);
    const size_t               row_size   = ggml_row_size(k.row_type, n);
    std::vector<uint8_t>       y(row_size * size_t(n_rows));
    floats                     found(size_t(n_columns * n_rows));
    floats                     expected(found.size());

    std::vector<float *>      s;
    std::vector<const void *> rows;
    for (int i = 0; i < n_rows; i++) {
        uint8_t * row = y.data() + size_t(i) * row_size;
        ggml_get_type_traits_cpu(k.row_type)->from_float(x.data() + i * n, row, n);
        k.gemv(n, expected.data() + i * n_columns, n_columns, w.data(), row, 1, n_columns);
        s.push_back(found.data() + i * n_columns);
        rows.push_back(row);
        CHECK(ggml_gemv_repacked_row(k.type, n, s.back(), w.data(), row, n_columns) == has);
    }
    CHECK((!has || equal_bits(found, expected)));
    std::fill(found.begin(), found.end(), 0.0F);
    CHECK(ggml_gemv_repacked_rows(k.type, n, s.data(), w.data(), rows.data(), n_rows, n_columns) == has);
    CHECK((!has || equal_bits(found, expected)));

    for (int i = 0; i < n_rows; i += 4) {
        k.quantize(x.data() + i * n, y.data() + size_t(i) * row_size, n);
    }
    k.gemm(n, expected.data(), n_columns, w.data(), y.data(), n_rows, n_columns);
    CHECK(ggml_gemm_repacked_rows(k.type, n, found.data(), n_columns, w.data(), y.data(), n_rows, n_columns) == has);
    CHECK((!has || equal_bits(found, expected)));
}

TEST_CASE("kernels have the bits of ggml's, for the largest values and sizes, too") {
    ggml_cpu_init();
    for (const kernels & k : KERNELS) {
        for (const int fill : { 0xff, 0x77, 0x88, -1 }) {
            CAPTURE(ggml_type_name(k.type));
            CAPTURE(fill);
            check_kernels(k, 8192, 4, fill);
            check_kernels(k, 768, 32, fill);
        }
    }
}

TEST_CASE("other types and longer rows are left to ggml") {
    CHECK_FALSE(ggml_gemv_repacked_rows(GGML_TYPE_Q8_0, 256, nullptr, nullptr, nullptr, 0, 0));
    CHECK_FALSE(ggml_gemv_repacked_rows(GGML_TYPE_Q4_0, 8224, nullptr, nullptr, nullptr, 0, 0));
    CHECK_FALSE(ggml_gemv_repacked_row(GGML_TYPE_Q8_0, 256, nullptr, nullptr, nullptr, 0));
    CHECK_FALSE(ggml_gemv_repacked_row(GGML_TYPE_Q4_0, 8224, nullptr, nullptr, nullptr, 0));
}
