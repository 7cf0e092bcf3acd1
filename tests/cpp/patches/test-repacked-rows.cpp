// SPDX-License-Identifier: MIT
#include "../../patches/ggml-cpu/repacked-rows.h"

#include "device/repacked-layout.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <random>
#include <utility>
#include <vector>

using floats = std::vector<float>;

static constexpr int64_t N_EXPERTS = 3;

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static floats random_floats(int64_t n, unsigned seed) {
    std::mt19937 random(seed);
    floats       values(static_cast<size_t>(n));
    for (float & value : values) {
        value = float(int(random() % 2001) - 1000) / 500.0F;
    }
    return values;
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
        REQUIRE(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
        const float * out = static_cast<const float *>(product->data);
        return floats(out, out + ggml_nelements(product));
    }

    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           tensor;
    bool                    is_packed = false;
};

static const ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_MXFP4, GGML_TYPE_IQ4_NL, GGML_TYPE_Q2_K };

// Each thread gets an odd number of groups of the first's rows, and wide vectors take two. The last has more blocks
// than sums are kept of.
static const hobbit::matrix_shape SHAPES[] = { { 512, 80 }, { 256, 16 }, { 8448, 16 } };

static floats token(const floats & all, int64_t i, int64_t n) {
    return floats(all.begin() + i * n, all.begin() + (i + 1) * n);
}

TEST_CASE("several tokens of an expert get the bits of each alone") {
    bool any = false;
    for (const ggml_type type : TYPES) {
        for (const hobbit::matrix_shape & shape : SHAPES) {
            const weights experts(type, shape, N_EXPERTS);
            any = any || experts.is_packed;
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
                    REQUIRE(alone == token(together, i, 2 * shape.n_out));
                }
            }
        }
    }
    CHECK((any || !HOBBIT_TEST_REPACK || !ggml_cpu_has_avx2()));
}

TEST_CASE("tokens that make no group of four for a matrix get the bits of each alone") {
    for (const ggml_type type : TYPES) {
        for (const hobbit::matrix_shape & shape : SHAPES) {
            const weights matrix(type, shape, 1);
            for (const int64_t n_tokens : { 2, 3, 6, 7 }) {
                CAPTURE(ggml_type_name(type));
                CAPTURE(shape.n_in);
                CAPTURE(n_tokens);
                const floats tokens   = random_floats(shape.n_in * n_tokens, 2);
                const floats together = matrix.multiply(tokens);
                for (int64_t i = n_tokens - n_tokens % 4; i < n_tokens; i++) {
                    REQUIRE(matrix.multiply(token(tokens, i, shape.n_in)) == token(together, i, shape.n_out));
                }
            }
        }
    }
}

extern "C" {
using quantize_by_four = void(const float * x, void * y, int64_t n);
using multiply_all     = void(int n, float * s, size_t bs, const void * vx, const void * vy, int nr, int nc);
quantize_by_four ggml_quantize_mat_q8_0_4x8, ggml_quantize_mat_q8_K_4x8;
multiply_all     ggml_gemm_q4_0_8x8_q8_0, ggml_gemm_q4_K_8x8_q8_K, ggml_gemm_mxfp4_8x8_q8_0;
}

static void check_rows_of_four(ggml_type type, quantize_by_four * quantize, multiply_all * multiply) {
    for (const hobbit::matrix_shape & shape : { hobbit::matrix_shape{ 512, 80 }, { 768, 16 } }) {
        const weights matrix(type, shape, 1);
        const size_t  row_size = size_t(shape.n_in) * 2; // more than any type needs
        const int     n_in     = int(shape.n_in);
        for (const int n_tokens : { 4, 8, 12, 36, 72 }) {
            CAPTURE(ggml_type_name(type));
            CAPTURE(n_tokens);
            const floats      tokens = random_floats(shape.n_in * n_tokens, 3);
            std::vector<char> quantized(row_size * size_t(n_tokens));
            const size_t      four = type == GGML_TYPE_Q4_K ? 4 * ggml_row_size(GGML_TYPE_Q8_K, n_in)
                                                            : 4 * ggml_row_size(GGML_TYPE_Q8_0, n_in);
            for (int i = 0; i < n_tokens; i += 4) {
                quantize(tokens.data() + i * n_in, quantized.data() + size_t(i / 4) * four, n_in);
            }
            floats expected(size_t(shape.n_out * n_tokens));
            floats found(expected.size());
            // all groups but one, so that wide vectors have a half of their last
            const int n_out = int(shape.n_out) - 8;
            if (matrix.is_packed && ggml_gemm_repacked_rows(type, n_in, found.data(), size_t(shape.n_out),
                                                            matrix.tensor->data, quantized.data(), n_tokens, n_out)) {
                multiply(n_in, expected.data(), size_t(shape.n_out), matrix.tensor->data, quantized.data(), n_tokens,
                         n_out);
                REQUIRE(found == expected);
            }
        }
    }
}

TEST_CASE("tokens quantized by fours get the bits of ggml's kernels") {
    ggml_cpu_init();
    check_rows_of_four(GGML_TYPE_Q4_0, ggml_quantize_mat_q8_0_4x8, ggml_gemm_q4_0_8x8_q8_0);
    check_rows_of_four(GGML_TYPE_Q4_K, ggml_quantize_mat_q8_K_4x8, ggml_gemm_q4_K_8x8_q8_K);
    check_rows_of_four(GGML_TYPE_MXFP4, ggml_quantize_mat_q8_0_4x8, ggml_gemm_mxfp4_8x8_q8_0);
}
