// SPDX-License-Identifier: MIT
// Products of weights as files have them, through ggml's graph: bits are those of one row after the other.
#include "../../llama_ext/cpu/plain-rows.h"

#include "device/device-traits.h"
#include "fixtures/cpu-graph.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

// null where the processor lacks instructions
extern __attribute__((weak)) const plain_kernel f16_kernel, q2_0_kernel, q6_k_kernel, q8_0_kernel;

// from ggml's traits.h: true if a buffer type has kernels of its own for the operation
extern "C" bool ggml_cpu_extra_work_size(int n_threads, const ggml_tensor * op, size_t * size);

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// A few rows, made once: for some types it takes long to find the best values.
static const std::vector<char> & some_rows(ggml_type type, int64_t n) {
    static std::map<std::pair<ggml_type, int64_t>, std::vector<char>> made;
    std::vector<char> &                                               rows = made[{ type, n }];
    if (rows.empty()) {
        constexpr int64_t n_rows = 3;
        const floats      values = random_floats(n * n_rows, 1);
        const floats      importance(size_t(n), 1.0F);
        rows.resize(ggml_row_size(type, n) * n_rows);
        ggml_quantize_chunk(type, values.data(), rows.data(), 0, n_rows, n, importance.data());
    }
    return rows;
}

class operation {
  public:
    operation() : ctx(ggml_init({ size_t(64) << 20, nullptr, false })) { ggml_cpu_init(); }

    ggml_tensor * weights(ggml_type type, int64_t n, int64_t n_rows, int64_t n_2 = 1, int64_t n_3 = 1) const {
        ggml_tensor *             t    = ggml_new_tensor_4d(ctx.get(), type, n, n_rows, n_2, n_3);
        const std::vector<char> & rows = some_rows(type, n);
        for (size_t i = 0; i < ggml_nbytes(t); i++) {
            static_cast<char *>(t->data)[i] = rows[i % rows.size()];
        }
        return t;
    }

    ggml_tensor * tokens(int64_t n, int64_t n_1, int64_t n_2 = 1, int64_t n_3 = 1) const {
        ggml_tensor * t      = ggml_new_tensor_4d(ctx.get(), GGML_TYPE_F32, n, n_1, n_2, n_3);
        const floats  values = random_floats(ggml_nelements(t), 2);
        std::copy(values.begin(), values.end(), static_cast<float *>(t->data));
        return t;
    }

    ggml_tensor * ids(const std::vector<int32_t> & experts, int64_t n_tokens) const {
        ggml_tensor * t = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, int64_t(experts.size()) / n_tokens, n_tokens);
        std::copy(experts.begin(), experts.end(), static_cast<int32_t *>(t->data));
        return t;
    }

    ggml_context_ptr ctx;
};

static const char * row_at(const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
    return static_cast<const char *>(t->data) + size_t(i1) * t->nb[1] + size_t(i2) * t->nb[2] + size_t(i3) * t->nb[3];
}

// Products of the matrix and one row of floats, by ggml's function for two rows.
static floats expected(const ggml_tensor * w, int64_t i2, int64_t i3, const char * x) {
    const ggml_type_traits_cpu & traits = *ggml_get_type_traits_cpu(w->type);
    std::vector<char>            y(ggml_row_size(traits.vec_dot_type, w->ne[0]));
    const auto                   from_float = ggml_get_type_traits_cpu(traits.vec_dot_type)->from_float;
    from_float(reinterpret_cast<const float *>(x), y.data(), w->ne[0]);
    floats out(size_t(w->ne[1]));
    for (int64_t row = 0; row < w->ne[1]; row++) {
        traits.vec_dot(int(w->ne[0]), &out[size_t(row)], 0, row_at(w, row, i2, i3), 0, y.data(), 0, 1);
    }
    return out;
}

static bool has_bits(const ggml_tensor * out, int64_t i1, int64_t i2, int64_t i3, const floats & row) {
    return std::memcmp(row_at(out, i1, i2, i3), row.data(), row.size() * sizeof(float)) == 0;
}

static bool is_ours(const ggml_tensor * out) {
    size_t size = 0;
    return ggml_cpu_extra_work_size(1, out, &size);
}

// The types of weights that ggml multiplies, but those whose tables take seconds to make.
static std::vector<ggml_type> types() {
    constexpr ggml_type slow[] = { GGML_TYPE_IQ1_S, GGML_TYPE_IQ1_M, GGML_TYPE_IQ2_XXS, GGML_TYPE_IQ2_XS,
                                   GGML_TYPE_IQ2_S };
    ggml_cpu_init();
    std::vector<ggml_type> found;
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const ggml_type type = ggml_type(i);
        if (ggml_get_type_traits_cpu(type)->vec_dot && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K &&
            ggml_blck_size(type) > 0 && !std::count(std::begin(slow), std::end(slow), type)) {
            found.push_back(type);
        }
    }
    return found;
}

static bool has_kernel(ggml_type type) {
    return (type == GGML_TYPE_Q2_0 && &q2_0_kernel) || (type == GGML_TYPE_Q8_0 && &q8_0_kernel) ||
           (type == GGML_TYPE_Q6_K && &q6_k_kernel);
}

static constexpr int N_THREADS[] = { 1, 2, 4 };

TEST_CASE("the CPU has our buffer type") {
    CHECK(hobbit::extra_type(cpu_device(), "CPU_PLAIN_ROWS"));
    CHECK_FALSE(hobbit::extra_type(cpu_device(), "CPU_OTHER_ROWS"));
}

TEST_CASE("one row of activations and weights of each type") {
    for (const ggml_type type : types()) {
        CAPTURE(int(type));
        for (const int n_threads : N_THREADS) {
            for (const int64_t n_rows : { 1, 37, 300 }) {
                const operation     op;
                const ggml_tensor * w = op.weights(type, 512, n_rows);
                const ggml_tensor * x = op.tokens(512, 1);
                ggml_tensor *       out =
                    ggml_mul_mat(op.ctx.get(), const_cast<ggml_tensor *>(w), const_cast<ggml_tensor *>(x));
                REQUIRE(is_ours(out));
                REQUIRE(compute_on_cpu(op.ctx.get(), out, n_threads) == GGML_STATUS_SUCCESS);
                REQUIRE(has_bits(out, 0, 0, 0, expected(w, 0, 0, row_at(x, 0, 0, 0))));
            }
        }
    }
}

TEST_CASE("matrices that several rows share, and rows that lie apart") {
    for (const ggml_type type :
         { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q2_0, GGML_TYPE_Q6_K }) {
        CAPTURE(int(type));
        for (const int64_t n_tokens : { 1, 5, 33 }) {
            const operation op;
            ggml_tensor *   w      = op.weights(type, 256, 72, 2, 3);
            ggml_tensor *   wide   = op.tokens(300, n_tokens, 4, 6);
            ggml_tensor *   x      = ggml_view_4d(op.ctx.get(), wide, 256, n_tokens, 4, 6, wide->nb[1], wide->nb[2],
                                                  wide->nb[3], 16 * sizeof(float));
            ggml_tensor *   out    = ggml_mul_mat(op.ctx.get(), w, x);
            const bool      is_one = type == GGML_TYPE_F16 && &f16_kernel && n_tokens == 1;
            CHECK(is_ours(out) == (has_kernel(type) || is_one)); // without a kernel, ggml is as fast
            REQUIRE(compute_on_cpu(op.ctx.get(), out, 2) == GGML_STATUS_SUCCESS);
            for (int64_t i = 0; i < n_tokens * 24; i++) {
                const int64_t i1       = i % n_tokens;
                const int64_t i2       = i / n_tokens % 4;
                const int64_t i3       = i / n_tokens / 4;
                const bool    is_tiled = type == GGML_TYPE_Q6_K && n_tokens >= TILED_ROWS;
                if (n_tokens == 1 || (is_ours(out) && !is_tiled)) { // ggml's of several rows may have another order
                    REQUIRE(has_bits(out, i1, i2, i3, expected(w, i2 / 2, i3 / 2, row_at(x, i1, i2, i3))));
                }
            }
        }
    }
}

TEST_CASE("experts of one token, in weights of each type, without those that are left out") {
    for (const ggml_type type : types()) {
        CAPTURE(int(type));
        for (const int n_threads : N_THREADS) {
            for (const int64_t n_x : { 1, 4 }) { // one row of activations for all experts, or one for each
                const operation            op;
                const std::vector<int32_t> experts = { 6, -1, 0, 3 };
                ggml_tensor *              w       = op.weights(type, 256, 100, 7);
                ggml_tensor *              x       = op.tokens(256, n_x, 1);
                ggml_tensor *              out     = ggml_mul_mat_id(op.ctx.get(), w, x, op.ids(experts, 1));
                std::memset(out->data, 0x55, ggml_nbytes(out));
                const floats untouched(static_cast<float *>(out->data), static_cast<float *>(out->data) + out->ne[0]);
                REQUIRE(is_ours(out));
                REQUIRE(compute_on_cpu(op.ctx.get(), out, n_threads) == GGML_STATUS_SUCCESS);
                for (int64_t i = 0; i < 4; i++) {
                    const int32_t expert = experts[size_t(i)];
                    const floats  row    = expert < 0 ? untouched : expected(w, expert, 0, row_at(x, i % n_x, 0, 0));
                    REQUIRE(has_bits(out, i, 0, 0, row));
                }
            }
        }
    }
}

TEST_CASE("keys and values in half precision that heads share") {
    for (const int64_t n : { 64, 200, 512, 1088 }) {
        CAPTURE(n);
        for (const int64_t n_heads : { 1, 2, 3, 8, 9, 37 }) {
            CAPTURE(n_heads);
            for (const int64_t n_rows : { 1, 15, 70 }) {
                const operation op;
                ggml_tensor *   w   = op.weights(GGML_TYPE_F16, n, n_rows, 2);
                ggml_tensor *   x   = op.tokens(n, 1, 2 * n_heads);
                ggml_tensor *   out = ggml_mul_mat(op.ctx.get(), w, x);
                REQUIRE(compute_on_cpu(op.ctx.get(), out, 2) == GGML_STATUS_SUCCESS);
                for (int64_t i = 0; i < 2 * n_heads; i++) {
                    REQUIRE(has_bits(out, 0, i, 0, expected(w, i / n_heads, 0, row_at(x, 0, i, 0))));
                }
            }
        }
    }
}

TEST_CASE("experts of several tokens in the types that have kernels") {
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q2_0 }) {
        CAPTURE(int(type));
        for (const int n_threads : N_THREADS) {
            for (const int64_t n_tokens : { 2, 9, 130 }) {
                const operation      op;
                std::vector<int32_t> experts;
                for (int64_t i = 0; i < n_tokens; i++) { // all choose the first, some none beside it, nobody the last
                    experts.push_back(0);
                    experts.push_back(i % 5 == 0 ? -1 : int32_t(1 + i % 3));
                }
                ggml_tensor * w   = op.weights(type, 192, 130, 5);
                ggml_tensor * x   = op.tokens(192, 2, n_tokens);
                ggml_tensor * out = ggml_mul_mat_id(op.ctx.get(), w, x, op.ids(experts, n_tokens));
                REQUIRE(compute_on_cpu(op.ctx.get(), out, n_threads) == GGML_STATUS_SUCCESS);
                for (int64_t i = 0; i < 2 * n_tokens; i++) {
                    if (const int32_t expert = experts[size_t(i)]; expert >= 0) {
                        REQUIRE(has_bits(out, i % 2, i / 2, 0, expected(w, expert, 0, row_at(x, i % 2, i / 2, 0))));
                    }
                }
            }
        }
    }
}

// Has it the bits of ggml's own product, which weights get that do not lie in host memory by their buffer's word?
static bool is_as_ggmls(const operation & op, ggml_tensor * ours, int n_threads) {
    ggml_backend_buffer_type type = *ggml_backend_cpu_buffer_type();
    type.iface.is_host            = nullptr;
    const ggml_backend_buffer_ptr elsewhere(ggml_backend_buft_alloc_buffer(&type, 0));
    ggml_tensor *                 w = ggml_dup_tensor(op.ctx.get(), ours->src[0]);
    std::memcpy(w->data, ours->src[0]->data, ggml_nbytes(w));
    w->buffer           = elsewhere.get();
    ggml_tensor * ggmls = ours->src[2] ? ggml_mul_mat_id(op.ctx.get(), w, ours->src[1], ours->src[2])
                                       : ggml_mul_mat(op.ctx.get(), w, ours->src[1]);
    REQUIRE_FALSE(is_ours(ggmls));
    REQUIRE(compute_on_cpu(op.ctx.get(), ours, n_threads) == GGML_STATUS_SUCCESS);
    REQUIRE(compute_on_cpu(op.ctx.get(), ggmls, n_threads) == GGML_STATUS_SUCCESS);
    return std::memcmp(ours->data, ggmls->data, ggml_nbytes(ours)) == 0;
}

TEST_CASE("few rows of activations and many, with the bits of ggml's tiled products") {
    for (const int n_threads : N_THREADS) {
        for (const int64_t n_tokens : { 2, 7, 8, 9, 33, 70 }) {
            const operation op;
            ggml_tensor *   w   = op.weights(GGML_TYPE_Q6_K, 1024, 132);
            ggml_tensor *   out = ggml_mul_mat(op.ctx.get(), w, op.tokens(1024, n_tokens));
            CHECK(is_ours(out) == (&q6_k_kernel != nullptr));
            REQUIRE(is_as_ggmls(op, out, n_threads));
        }
        const operation      op;
        std::vector<int32_t> experts;
        for (int64_t i = 0; i < 40; i++) { // experts have 33, 7, 20 and 20 tokens, and the last has none
            experts.push_back(i < 33 ? 0 : 1);
            experts.push_back(int32_t(2 + i % 2));
        }
        ggml_tensor * w = op.weights(GGML_TYPE_Q6_K, 768, 132, 5);
        REQUIRE(
            is_as_ggmls(op, ggml_mul_mat_id(op.ctx.get(), w, op.tokens(768, 2, 40), op.ids(experts, 40)), n_threads));
    }
}

TEST_CASE("products that are not ours are left to ggml") {
    const operation op;
    ggml_tensor *   x = op.tokens(256, 4);
    CHECK_FALSE(is_ours(ggml_mul_mat(op.ctx.get(), op.weights(GGML_TYPE_Q4_K, 256, 8), x)));
    CHECK_FALSE(is_ours(ggml_mul_mat(op.ctx.get(), op.weights(GGML_TYPE_Q6_K, 256, 9), x)));
    CHECK_FALSE(is_ours(ggml_mul_mat(op.ctx.get(), op.weights(GGML_TYPE_Q8_0, 256, 8), op.tokens(256, 3))));
    CHECK_FALSE(is_ours(ggml_add(op.ctx.get(), x, x)));
    ggml_tensor * half = ggml_new_tensor_2d(op.ctx.get(), GGML_TYPE_F16, 256, 1);
    CHECK_FALSE(is_ours(ggml_mul_mat(op.ctx.get(), op.weights(GGML_TYPE_F16, 256, 8), half)));
    ggml_tensor * rotated = ggml_mul_mat(op.ctx.get(), op.weights(GGML_TYPE_F32, 256, 256), op.tokens(256, 1));
    ggml_mul_mat_set_hint(rotated, GGML_HINT_SRC0_IS_HADAMARD);
    CHECK_FALSE(is_ours(rotated));

    // weights in a layout of ggml's own
    const hobbit::matrix_shape       shape  = { 256, 16 };
    const ggml_backend_buffer_type_t layout = hobbit::packed_layout(cpu_device(), GGML_TYPE_Q4_0, shape, 1);
    if (layout) {
        const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(layout, 0));
        ggml_tensor *                 w   = op.weights(GGML_TYPE_Q4_0, 256, 16);
        ggml_tensor *                 one = ggml_mul_mat(op.ctx.get(), w, op.tokens(256, 1));
        CHECK(is_ours(one));
        w->buffer = buffer.get();
        w->extra  = nullptr; // the layout has no kernel for it either
        CHECK_FALSE(is_ours(one));
    }
}

TEST_CASE("a product that is aborted ends after a few chunks") {
    for (const bool has_ids : { false, true }) {
        const operation op;
        ggml_tensor *   w = op.weights(GGML_TYPE_Q2_0, 256, 4000);
        ggml_tensor *   x = op.tokens(256, 1, 1);
        ggml_tensor *   out =
            has_ids ? ggml_mul_mat_id(op.ctx.get(), w, x, op.ids({ 0 }, 1)) : ggml_mul_mat(op.ctx.get(), w, x);
        std::memset(out->data, 0, ggml_nbytes(out));
        int        calls = 0;
        const auto abort = [](void * data) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1)); // it is asked once in a millisecond
            return ++*static_cast<int *>(data) > 3;
        };
        CHECK(compute_on_cpu(op.ctx.get(), out, 1, abort, &calls) == GGML_STATUS_ABORTED);
        CHECK(static_cast<float *>(out->data)[3999] == 0.0F);
        CHECK(calls < 8);
    }
}
