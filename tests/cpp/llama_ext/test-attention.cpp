// SPDX-License-Identifier: MIT
// Attention that reads keys and values once for all heads has the bits of ggml's own, which computes heads that have
// keys of their own: copies.
#include "fixtures/cpu-graph.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

// from llama_ext/cpu/attention.h: true for rows that it computes, here for none of them. Stock's libraries lack it.
__attribute__((weak)) bool ggml_cpu_attention(ggml_tensor *, int, int, int64_t, int64_t, float *, int64_t);

struct shape {
    ggml_type keys, values;
    int64_t   n_keys, n_values; // numbers of a key and of a value
    int64_t   n_heads, n_kv;
    int64_t   n_tokens, n_positions;
    int64_t   n_stacks   = 1;
    bool      has_mask   = true;
    bool      has_sinks  = false;
    float     soft_cap   = 0.0F;
    bool      is_flash   = true;
    int64_t   n_window   = 0;     // 0: no sliding window
    bool      has_unused = false; // positions that no token sees, as of another sequence
};

// An operation, its tensors laid out as those of a cache: all heads of a position together, and room behind.
class operation {
  public:
    // copies: each query head has keys and values of its own, which ggml computes.
    operation(const shape & s, bool copies) :
        shape_(s), copies_(copies), ctx_(ggml_init({ size_t(300) << 20, nullptr, false })) {
        ggml_cpu_init();
        ggml_tensor * q = ggml_permute(ctx(), floats_of(s.n_keys, s.n_heads, s.n_tokens, s.n_stacks, 1), 0, 2, 1, 3);
        ggml_tensor * k = cache(s.keys, s.n_keys, 2);
        ggml_tensor * v = cache(s.values, s.n_values, 3);
        const float   scale = 1.0F / std::sqrt(float(s.n_keys));
        op_ = ggml_flash_attn_ext(ctx(), q, k, v, s.has_mask ? mask() : nullptr, scale, 0.0F, s.soft_cap);
        if (!s.is_flash) { // values of a number lie together
            ggml_tensor * weights = ggml_soft_max_ext(ctx(), ggml_mul_mat(ctx(), k, q), mask(), scale, 0.0F);
            v                     = ggml_cont(ctx(), ggml_transpose(ctx(), v));
            REQUIRE(compute_on_cpu(ctx(), v, 1) == GGML_STATUS_SUCCESS);
            v->op = GGML_OP_NONE; // it was computed
            op_   = ggml_mul_mat(ctx(), v, weights);
        }
        if (s.has_sinks) {
            ggml_flash_attn_ext_add_sinks(op_, floats_of(s.n_heads, 1, 1, 1, 4));
        }
    }

    bool is_ours() const { return shape_.is_flash && ggml_cpu_attention(op_, 0, 0, 0, 0, nullptr, 0); }

    floats compute(int n_threads) const { return floats_on_cpu(ctx(), op_, n_threads); }

  private:
    ggml_context * ctx() const { return ctx_.get(); }

    ggml_tensor * floats_of(int64_t n_0, int64_t n_1, int64_t n_2, int64_t n_3, unsigned seed) const {
        ggml_tensor * t      = ggml_new_tensor_4d(ctx(), GGML_TYPE_F32, n_0, n_1, n_2, n_3);
        const floats  values = random_floats(ggml_nelements(t), seed);
        std::copy(values.begin(), values.end(), static_cast<float *>(t->data));
        return t;
    }

    ggml_tensor * cache(ggml_type type, int64_t n, unsigned seed) const {
        const int64_t n_kv   = copies_ ? shape_.n_heads : shape_.n_kv;
        ggml_tensor * t      = ggml_new_tensor_4d(ctx(), type, n, n_kv, shape_.n_positions, shape_.n_stacks);
        const floats  values = random_floats(ggml_nelements(t) / n_kv * shape_.n_kv, seed);
        for (int64_t i = 0; i < ggml_nrows(t); i++) {
            const float * from = values.data() + i * shape_.n_kv / n_kv * n;
            ggml_quantize_chunk(type, from, static_cast<char *>(t->data) + i * t->nb[1], 0, 1, n, nullptr);
        }
        return ggml_permute(ctx(), t, 0, 2, 1, 3);
    }

    // Tokens are the last positions and see those before them.
    ggml_tensor * mask() const {
        const shape & s    = shape_;
        ggml_tensor * t    = ggml_new_tensor_4d(ctx(), GGML_TYPE_F16, s.n_positions, s.n_tokens, 1, s.n_stacks);
        auto *        half = static_cast<ggml_fp16_t *>(t->data);
        for (int64_t i = 0; i < ggml_nelements(t); i++) {
            const int64_t position = i % s.n_positions;
            const int64_t own      = s.n_positions - s.n_tokens + i / s.n_positions % s.n_tokens;
            const bool    is_near  = s.n_window == 0 || own - position < s.n_window;
            const bool    is_used  = !s.has_unused || position / 37 % 3 != 1;
            half[i]                = ggml_fp32_to_fp16(position <= own && is_near && is_used ? 0.0F : -INFINITY);
        }
        return t;
    }

    shape            shape_;
    bool             copies_;
    ggml_context_ptr ctx_;
    ggml_tensor *    op_ = nullptr;
};

static void check(const shape & s) {
    CAPTURE(ggml_type_name(s.keys));
    CAPTURE(ggml_type_name(s.values));
    CAPTURE(s.n_keys);
    CAPTURE(s.n_heads);
    CAPTURE(s.n_kv);
    CAPTURE(s.n_tokens);
    CAPTURE(s.n_positions);
    const operation ours(s, false), by_ggml(s, true);
    REQUIRE_FALSE(by_ggml.is_ours());
    for (const int n_threads : { 1, 2, 4, 8, 16 }) {
        CAPTURE(n_threads);
        REQUIRE(equal_bits(ours.compute(n_threads), by_ggml.compute(n_threads)));
    }
}

static constexpr ggml_type F16 = GGML_TYPE_F16, F32 = GGML_TYPE_F32, BF16 = GGML_TYPE_BF16, Q8_0 = GGML_TYPE_Q8_0;

TEST_CASE("one token has ggml's bits, for each type of cache, depth and number of threads") {
    for (const ggml_type type : { F16, F32, BF16, Q8_0, GGML_TYPE_Q4_0 }) {
        for (const int64_t depth : { 1, 15, 256, 511, 512, 700, 2048 }) {
            check({ type, type, 128, 128, 8, 2, 1, depth });
        }
    }
}

TEST_CASE("heads of each size and number have ggml's bits") {
    for (const ggml_type type : { F16, F32, Q8_0 }) {
        for (const int64_t depth : { 300, 900 }) {
            check({ type, type, 64, 64, 16, 2, 1, depth });
            check({ type, type, 256, 256, 6, 2, 1, depth });
            check({ type, type, 192, 128, 4, 2, 1, depth });
            check({ type, type, 576, 512, 20, 1, 1, depth });
            check({ type, type, 128, 128, 5, 1, 3, depth });
            check({ type, type, 96, 96, 4, 2, 1, depth }); // ggml computes floats
        }
    }
}

TEST_CASE("some tokens have ggml's bits") {
    for (const ggml_type type : { F16, F32, BF16, Q8_0 }) {
        for (const int64_t n_tokens : { 2, 5, 33, 63, 64, 100 }) {
            check({ type, type, 128, 128, 8, 2, n_tokens, 320 });
        }
    }
}

TEST_CASE("sequences, windows, sinks and soft caps have ggml's bits") {
    for (const ggml_type type : { F16, F32, BF16, Q8_0 }) {
        for (const int64_t n_tokens : { 1, 4, 70 }) {
            shape s      = { type, type, 64, 64, 8, 2, n_tokens, 640 };
            s.has_unused = true;
            check(s);
            s.has_sinks = true;
            check(s);
            s.n_window = 128;
            check(s);
            s.soft_cap = 20.0F;
            check(s);
            s.n_stacks = 3;
            check(s);
            s.has_mask = false;
            check(s);
        }
    }
}

TEST_CASE("without flash attention heads that share keys have ggml's bits") {
    for (const int64_t n_tokens : { 1, 3 }) {
        for (const int64_t depth : { 64, 300, 1024 }) {
            for (shape s :
                 { shape{ F16, F16, 128, 128, 32, 4, n_tokens, depth },
                   shape{ F16, F16, 64, 64, 12, 4, n_tokens, depth }, shape{ F16, F16, 80, 80, 10, 2, n_tokens, depth },
                   shape{ F16, F16, 576, 512, 9, 1, n_tokens, depth } }) {
                s.is_flash = false;
                check(s);
            }
        }
    }
}

TEST_CASE("keys and values of different types have ggml's bits") {
    for (const int64_t n_tokens : { 1, 3, 64 }) {
        check({ Q8_0, F16, 128, 128, 8, 2, n_tokens, 600 });
        check({ F16, Q8_0, 128, 128, 8, 2, n_tokens, 600 });
        check({ F16, F32, 128, 128, 8, 2, n_tokens, 600 });
        check({ F32, F16, 128, 128, 8, 2, n_tokens, 600 });
    }
}

TEST_CASE("caches of usual models are computed by our kernel") {
    if (!ggml_cpu_has_avx2()) {
        return;
    }
    for (const ggml_type type : { F16, BF16, Q8_0 }) {
        CHECK(operation({ type, type, 128, 128, 32, 4, 1, 4096 }, false).is_ours());
        CHECK(operation({ type, type, 128, 128, 32, 4, 8, 4096 }, false).is_ours());
    }
}

// Also with stock llama.cpp's libraries: a page of results has the command. Other processes hardly disturb it.
TEST_CASE("milliseconds of a processor" * doctest::skip()) {
    std::vector<shape> shapes;
    for (const int64_t depth : { 512, 4096, 16384 }) {
        shapes.push_back({ F16, F16, 128, 128, 32, 4, 1, depth });
        shapes.push_back(shapes.back());
        shapes.back().is_flash = false;
    }
    shapes.push_back({ F16, F16, 128, 128, 32, 4, 8, 4096 });
    shapes.push_back({ F16, F16, 128, 128, 32, 4, 512, 512 });
    shapes.push_back({ F16, F16, 128, 128, 32, 4, 512, 4096 });
    shapes.push_back({ Q8_0, Q8_0, 128, 128, 32, 4, 1, 4096 });
    shapes.push_back({ F16, F16, 64, 64, 64, 8, 1, 4096 });
    shapes.push_back({ F16, F16, 576, 512, 128, 1, 1, 4096 });
    for (const shape & s : shapes) {
        const operation op(s, false);
        double          least = INFINITY;
        for (int i = 0; i < 9; i++) {
            const std::clock_t begin = std::clock();
            op.compute(1);
            least = std::min(least, 1e3 * double(std::clock() - begin) / CLOCKS_PER_SEC);
        }
        std::printf("%d positions, %d heads of %d, %d tokens, %s, %s: %.2f\n", int(s.n_positions), int(s.n_heads),
                    int(s.n_keys), int(s.n_tokens), ggml_type_name(s.keys), s.is_flash ? "flash attention" : "without",
                    least);
    }
}
