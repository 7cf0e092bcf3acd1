// SPDX-License-Identifier: MIT
// Products of weights as files have them, with the bits of ggml's products of repacked ones.
#include "../../llama_ext/cpu/plain-rows.h"

#include "fixtures/cpu-graph.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

// null where the processor lacks instructions
extern __attribute__((weak)) const plain_kernel iq4_nl_kernel, mxfp4_kernel, q2_k_kernel, q4_0_kernel, q4_k_kernel;

static const struct {
    ggml_type            type;
    const plain_kernel * kernel;
} KERNELS[] = {
    { GGML_TYPE_IQ4_NL, &iq4_nl_kernel }, { GGML_TYPE_MXFP4, &mxfp4_kernel }, { GGML_TYPE_Q2_K, &q2_k_kernel },
    { GGML_TYPE_Q4_0, &q4_0_kernel },     { GGML_TYPE_Q4_K, &q4_k_kernel },
};

static ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

static ggml_backend_buffer_type_t type_named(const std::string & name) {
    const auto get_extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_device()),
                                          "ggml_backend_dev_get_extra_bufts"));
    for (ggml_backend_buffer_type_t * type = get_extra(cpu_device()); *type; type++) {
        if (ggml_backend_buft_name(*type) == name) {
            return *type;
        }
    }
    return nullptr;
}

struct shape {
    int64_t n_in, n_out, n_matrices;
};

// Any bytes are weights, but scales must be finite: in the place of others, halves of 1 and exponents of 127.
static std::vector<char> some_weights(ggml_type type, const shape & of, int fill) {
    const size_t      size   = ggml_type_size(type);
    const size_t      half_1 = type == GGML_TYPE_Q2_K ? 80 : 0; // the first half of a block
    std::mt19937      random(7);
    std::vector<char> bytes(ggml_row_size(type, of.n_in) * size_t(of.n_out * of.n_matrices));
    for (char & byte : bytes) {
        byte = char(fill < 0 ? int(random() & 0xff) : fill);
    }
    for (size_t block = 0; block < bytes.size(); block += size) {
        if (type == GGML_TYPE_MXFP4) {
            bytes[block] = char(random() % 3 == 0 ? random() % 3 : 120 + random() % 15);
            continue;
        }
        for (size_t i = half_1; i < half_1 + (ggml_blck_size(type) == 256 ? 4 : 2); i += 2) {
            bytes[block + i]     = char(random());
            bytes[block + i + 1] = char(0x20 + random() % 0x20); // normal, at most 2
        }
    }
    return bytes;
}

// Rows of equal values are quantized to the largest integers.
static floats some_tokens(int64_t n, int64_t n_rows) {
    floats rows = random_floats(n * n_rows, 3);
    for (int64_t i = 0; i < std::min(n_rows, int64_t(3)) * n; i++) {
        rows[size_t(i)] = i < n ? 1.0F : i < 2 * n ? -1.0F : i % 2 == 0 ? 1.0F : -1.0F;
    }
    return rows;
}

class weights {
  public:
    weights(ggml_backend_buffer_type_t buft, ggml_type type, const shape & of, const std::vector<char> & bytes) :
        ctx(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true })),
        tensor(ggml_new_tensor_3d(ctx.get(), type, of.n_in, of.n_out, of.n_matrices)),
        buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft)) {
        ggml_backend_tensor_set(tensor, bytes.data(), 0, bytes.size());
    }

    // Products of planes of tokens, or, with `chosen`, of each token and the matrices that it chose.
    floats multiply(const floats & tokens, int n_threads, int64_t n_planes = 1,
                    const std::vector<int32_t> & chosen = {}) const {
        const int64_t          n = int64_t(tokens.size()) / tensor->ne[0];
        const ggml_context_ptr work(ggml_init({ size_t(16) << 20, nullptr, false }));
        ggml_tensor *          x = ggml_new_tensor_3d(work.get(), GGML_TYPE_F32, tensor->ne[0],
                                             chosen.empty() ? n / n_planes : 1, chosen.empty() ? n_planes : n);
        std::copy(tokens.begin(), tokens.end(), static_cast<float *>(x->data));
        ggml_tensor * product;
        if (chosen.empty()) {
            product = ggml_mul_mat(work.get(), tensor, x);
        } else {
            ggml_tensor * ids = ggml_new_tensor_2d(work.get(), GGML_TYPE_I32, int64_t(chosen.size()) / n, n);
            std::copy(chosen.begin(), chosen.end(), static_cast<int32_t *>(ids->data));
            product = ggml_mul_mat_id(work.get(), tensor, x, ids);
        }
        CHECK(ggml_backend_dev_supports_op(cpu_device(), product));
        return floats_on_cpu(work.get(), product, n_threads);
    }

    ggml_context_ptr        ctx;
    ggml_tensor *           tensor;
    ggml_backend_buffer_ptr buffer;
};

// Calls f for each type that has a kernel, with shapes and fillings.
template <typename F>
static void for_each_case(const std::vector<shape> & shapes, F f) {
    ggml_cpu_init();
    for (const auto & [type, kernel] : KERNELS) {
        for (const shape & of : shapes) {
            for (const int fill : { 0xff, 0x77, 0x88, -1 }) {
                if (kernel) {
                    CAPTURE(ggml_type_name(type));
                    CAPTURE(of.n_in);
                    CAPTURE(fill);
                    f(*kernel, of, some_weights(type, of, fill));
                }
            }
        }
    }
}

// Returns true if ggml repacks weights of this type here: sanitizers run without, to see what kernels read.
static bool is_repacked(ggml_type type) {
    return type_named("CPU_REPACK") && (type != GGML_TYPE_Q2_K || ggml_cpu_has_avx512());
}

static bool has_kernel(ggml_type type) {
#ifdef HOBBIT_TEST_AVX2
    const bool has_vnni = false;
#else
    const bool has_vnni = ggml_cpu_has_avx512_vnni() || ggml_cpu_has_avx_vnni();
#endif
    return ggml_cpu_has_avx2() && ggml_cpu_has_fma() && ggml_cpu_has_f16c() && (has_vnni || type != GGML_TYPE_IQ4_NL);
}

TEST_CASE("processors have the kernels that they can have") {
    ggml_cpu_init();
    for (const auto & [type, kernel] : KERNELS) {
        CAPTURE(ggml_type_name(type));
        CHECK((kernel != nullptr) == has_kernel(type));
        CHECK((!kernel || (kernel->type == type && kernel->repacked && kernel->repacked_by_fours)));
    }
}

extern "C" {
using quantize_by_four = void(const float * x, void * y, int64_t n);
quantize_by_four ggml_quantize_mat_q8_0_4x8, ggml_quantize_mat_q8_K_4x8;
}

// The largest row has as many blocks as four rows may have.
TEST_CASE("kernels have the bits of repacked rows") {
    for_each_case({ { 8192, 24, 1 }, { 768, 32, 1 }, { 65536, 8, 1 } }, [](const plain_kernel & k, const shape & of,
                                                                           const std::vector<char> & bytes) {
        const int64_t   n_rows   = of.n_in > 8192 ? 8 : 32;
        const floats    x        = some_tokens(of.n_in, n_rows);
        const ggml_type row_type = ggml_get_type_traits_cpu(k.type)->vec_dot_type;
        const auto      by_four  = row_type == GGML_TYPE_Q8_K ? ggml_quantize_mat_q8_K_4x8 : ggml_quantize_mat_q8_0_4x8;
        const size_t    size     = ggml_row_size(row_type, of.n_in);
        std::vector<char>         rows(size * size_t(n_rows)), fours(rows.size());
        std::vector<const void *> each, of_four;
        floats                    found(size_t(of.n_out * n_rows)), found_by_four(found.size());
        std::vector<float *>      s, s_by_four;
        for (int64_t i = 0; i < n_rows; i++) {
            ggml_get_type_traits_cpu(row_type)->from_float(x.data() + i * of.n_in, rows.data() + size_t(i) * size,
                                                           of.n_in);
            if (i % 4 == 0) {
                by_four(x.data() + i * of.n_in, fours.data() + size_t(i) * size, of.n_in);
            }
            each.push_back(rows.data() + size_t(i) * size);
            of_four.push_back(fours.data() + size_t(i / 4 * 4) * size);
            s.push_back(found.data() + i * of.n_out);
            s_by_four.push_back(found_by_four.data() + i * of.n_out);
        }
        const size_t bx = ggml_row_size(k.type, of.n_in);
        k.repacked(of.n_in, s.data(), bytes.data(), bx, each.data(), int(n_rows), of.n_out);
        k.repacked_by_fours(of.n_in, s_by_four.data(), bytes.data(), bx, of_four.data(), int(n_rows), of.n_out);
        if (!is_repacked(k.type)) {
            return;
        }
        const weights packed(type_named("CPU_REPACK"), k.type, of, bytes);
        CHECK(equal_bits(found_by_four, packed.multiply(x, 1)));
        floats alone;
        for (int64_t i = 0; i < n_rows; i++) {
            const floats one = packed.multiply(floats(x.begin() + i * of.n_in, x.begin() + (i + 1) * of.n_in), 1);
            alone.insert(alone.end(), one.begin(), one.end());
        }
        CHECK(equal_bits(found, alone));
    });
}

TEST_CASE("operations have the bits of repacked weights") {
    for_each_case({ { 512, 80, 1 }, { 256, 8, 1 }, { 1280, 40, 1 } }, [](const plain_kernel & k, const shape & of,
                                                                         const std::vector<char> & bytes) {
        if (!is_repacked(k.type)) {
            return;
        }
        const weights ours(type_named("CPU_PLAIN_ROWS"), k.type, of, bytes);
        const weights packed(type_named("CPU_REPACK"), k.type, of, bytes);
        for (const int64_t n : { 1, 2, 3, 4, 7, 37, 71 }) {
            for (const int64_t n_planes : { 1, 3 }) {
                for (const int n_threads : { 1, 2, 4, 8 }) {
                    CAPTURE(n);
                    CAPTURE(n_planes);
                    CAPTURE(n_threads);
                    const floats x = some_tokens(of.n_in, n * n_planes);
                    REQUIRE(equal_bits(ours.multiply(x, n_threads, n_planes), packed.multiply(x, n_threads, n_planes)));
                }
            }
        }
    });
}

TEST_CASE("operations on experts have the bits of repacked weights") {
    for_each_case({ { 512, 80, 3 }, { 256, 8, 3 } },
                  [](const plain_kernel & k, const shape & of, const std::vector<char> & bytes) {
                      if (!is_repacked(k.type)) {
                          return;
                      }
                      const weights ours(type_named("CPU_PLAIN_ROWS"), k.type, of, bytes);
                      const weights packed(type_named("CPU_REPACK"), k.type, of, bytes);
                      for (const int64_t n : { 1, 2, 5, 37, 71 }) {
                          std::vector<int32_t> chosen;
                          for (int32_t i = 0; i < n; i++) {
                              chosen.insert(chosen.end(), { 1, i % 3 == 0 ? 0 : 2 });
                          }
                          const floats x = some_tokens(of.n_in, n);
                          CAPTURE(n);
                          REQUIRE(equal_bits(ours.multiply(x, 2, 1, chosen), packed.multiply(x, 2, 1, chosen)));
                      }
                  });
}

TEST_CASE("weights that llama.cpp would not repack have no place there") {
    const ggml_backend_buffer_type_t ours = type_named("CPU_PLAIN_ROWS");
    REQUIRE(ours);
    const auto takes = [&](ggml_type type, int64_t n_in, int64_t n_out, int64_t n_matrices) {
        const ggml_context_ptr        ctx(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }));
        const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(ours, 0));
        ggml_tensor *                 w = ggml_new_tensor_3d(ctx.get(), type, n_in, n_out, n_matrices);
        ggml_tensor *                 x = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_in, 2);
        w->buffer                       = buffer.get();
        return ggml_backend_dev_supports_op(cpu_device(), ggml_mul_mat(ctx.get(), w, x));
    };
    CHECK(takes(GGML_TYPE_Q4_0, 256, 16, 1) == (type_named("CPU_REPACK") && has_kernel(GGML_TYPE_Q4_0)));
    CHECK_FALSE(takes(GGML_TYPE_Q4_0, 256, 12, 1));
    CHECK_FALSE(takes(GGML_TYPE_Q4_0, 65536 + 32, 16, 1));
    CHECK_FALSE(takes(GGML_TYPE_Q8_0, 256, 16, 1));
    CHECK_FALSE(takes(GGML_TYPE_F32, 256, 16, 1));
}
