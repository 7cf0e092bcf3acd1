// SPDX-License-Identifier: MIT
#include "attention.h"

#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// By instructions for half precision, ggml would add values otherwise.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512FP16__)

namespace {

constexpr int     ROWS    = 32;               // at once
constexpr int     BLOCK   = 16;               // positions at once: their keys and values stay in the first caches
constexpr int     AT_ONCE = GGML_F32_EPR / 4; // positions whose sums of products stay in registers
constexpr int64_t MOST    = 576;              // numbers of a key or a value

using block = float[BLOCK][MOST];

// A query of a head, and what was added to it so far.
struct row {
    const char *        keys, *values; // the first position's
    const ggml_fp16_t * mask;
    float *             to;
    float               M = -INFINITY; // the largest score
    float               S = 0.0F;      // the sum of factors
    alignas(64) float query[MOST];     // or bytes, in the type that keys are multiplied by
    alignas(64) float sum[MOST];       // values times factors

    // Adds a score: what was added before is scaled, and its value has the factor.
    void add(float score, float & scale, float & factor) {
        scale = factor = 1.0F;
        if (score > M) {
            scale = expf(M - score);
            M     = score;
        } else {
            factor = expf(score - M);
        }
        S = S * scale + factor;
    }
};

// Positions of a block that a row sees. The sum is scaled before the value times the factor is added to it.
struct positions {
    int   n        = 0;
    int   i[BLOCK] = {};
    float mask[BLOCK], score[BLOCK], scale[BLOCK], factor[BLOCK];
};

// Has the order of ggml_vec_dot_f16.
void multiply_keys(const float * query, const block & keys, int64_t n, positions & p) {
    for (int first = 0; first < p.n; first += AT_ONCE) {
        GGML_F32_VEC sum[AT_ONCE][GGML_F32_ARR] = {};
        for (int64_t d = 0; d < n; d += GGML_F32_STEP) {
            for (int j = 0; j < GGML_F32_ARR; j++) {
                const GGML_F32_VEC q = GGML_F32_VEC_LOAD(query + d + j * GGML_F32_EPR);
                for (int k = 0; k < AT_ONCE; k++) {
                    const float * key = keys[p.i[first + k]] + d + j * GGML_F32_EPR;
                    sum[k][j]         = GGML_F32_VEC_FMA(sum[k][j], GGML_F32_VEC_LOAD(key), q);
                }
            }
        }
        for (int k = 0; k < AT_ONCE; k++) {
            GGML_F32_VEC_REDUCE(p.score[first + k], sum[k]);
        }
    }
}

// N vectors at once stay in registers. is_f16: ggml keeps the sum in half precision, so each step is rounded.
template <bool is_f16, int N>
void add_values(float * sum, const block & values, int64_t n, const positions & p) {
    const auto rounded = [](GGML_F32_VEC x) {
        ggml_fp16_t half[GGML_F16_EPR];
        GGML_F16_VEC_STORE(half, (&x), 0);
        return is_f16 ? GGML_F16_VEC_LOAD(half, 0) : x;
    };
    for (int64_t d = 0; d < n; d += N * GGML_F32_EPR) {
        GGML_F32_VEC v[N];
        memcpy(v, sum + d, sizeof(v));
        for (int i = 0; i < p.n; i++) {
            for (int j = 0; j < N; j++) {
                const GGML_F32_VEC value = GGML_F32_VEC_LOAD(values[p.i[i]] + d + j * GGML_F32_EPR);
                if (p.scale[i] != 1.0F) {
                    v[j] = rounded(GGML_F32_VEC_MUL(v[j], GGML_F32_VEC_SET1(p.scale[i])));
                }
                v[j] = rounded(GGML_F32_VEC_FMA(v[j], value, GGML_F32_VEC_SET1(p.factor[i])));
            }
        }
        memcpy(sum + d, v, sizeof(v));
    }
}

struct attention {
    const ggml_tensor & op, &q = *op.src[0], &k = *op.src[1], &v = *op.src[2];
    const float * const params = (const float *) op.op_params; // scale of scores, bias, soft cap

    // Not if heads have keys of their own, biases or sinks: a compiler may fuse the sum with a sink otherwise here.
    bool is_ours() const {
        return k.ne[2] < q.ne[2] && k.ne[2] == v.ne[2] && params[1] == 0.0F && !op.src[4] && v.type != GGML_TYPE_F32 &&
               std::max(k.ne[0], v.ne[0]) <= MOST && (k.ne[0] | v.ne[0]) % GGML_F32_STEP == 0;
    }

    // Computes n_rows, at most ROWS; parts: where the sums of rows go if others add theirs.
    void compute(int first, int n_rows, int64_t ic0, int64_t ic1, float * parts, int64_t stride) const {
        const auto add = v.type != GGML_TYPE_F16              ? add_values<false, 4>
                         : v.ne[0] % (2 * GGML_F32_STEP) == 0 ? add_values<true, 8>
                                                              : add_values<true, 4>;
        row        rows[ROWS];
        block      keys, values;
        for (int r = 0; r < n_rows; r++) {
            begin(rows[r], first + r);
        }
        for (int64_t ic = ic0; ic < ic1; ic += BLOCK) {
            const int    n         = int(std::min<int64_t>(BLOCK, ic1 - ic));
            const char * converted = nullptr; // keys and values of this head
            for (int r = 0; r < n_rows; r++) {
                row &        to    = rows[r];
                const char * key   = to.keys + ic * k.nb[1];
                const char * value = to.values + ic * v.nb[1];
                positions    p;
                for (int i = 0; i < n; i++) {
                    p.i[p.n]     = i;
                    p.mask[p.n]  = to.mask ? GGML_CPU_FP16_TO_FP32(to.mask[ic + i]) : 0.0F;
                    p.n         += p.mask[p.n] != -INFINITY;
                }
                if (p.n > 0 && to.keys != converted) {
                    if (k.type == GGML_TYPE_F16) {
                        convert(k, key, n, keys);
                    }
                    convert(v, value, n, values);
                    converted = to.keys;
                }
                for (int i = BLOCK + r % 8; i < BLOCK + n; i += 8) { // the next block goes to the second cache
                    for (int64_t j = 0; j < 2 * k.ne[0]; j += 64) {
                        __builtin_prefetch(key + i * k.nb[1] + j, 0, 2);
                        __builtin_prefetch(value + i * v.nb[1] + j, 0, 2);
                    }
                }
                weigh(to, key, keys, p);
                add(to.sum, values, v.ne[0], p);
            }
        }
        for (int r = 0; r < n_rows; r++) {
            finish(rows[r], parts ? parts + (first + r) * stride : nullptr);
        }
    }

    static char * at(const ggml_tensor & t, int64_t i1, int64_t i2, int64_t i3) {
        return (char *) t.data + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3];
    }

    void begin(row & r, int64_t i) const {
        const int64_t       token = i % q.ne[1], stack = i / q.ne[1] / q.ne[2];
        const int64_t       head = i / q.ne[1] % q.ne[2];
        const ggml_tensor * mask = op.src[3];
        r.keys                   = at(k, 0, head * k.ne[2] / q.ne[2], stack);
        r.values                 = at(v, 0, head * k.ne[2] / q.ne[2], stack);
        r.mask = mask ? (const ggml_fp16_t *) at(*mask, token, head % mask->ne[2], stack % mask->ne[3]) : nullptr;
        r.to   = (float *) at(op, head, token, stack);
        memset(r.sum, 0, sizeof(r.sum));
        const auto type = ggml_get_type_traits_cpu(k.type)->vec_dot_type;
        ggml_get_type_traits_cpu(type)->from_float((const float *) at(q, token, head, stack), r.query, k.ne[0]);
        if (k.type == GGML_TYPE_F16) {
            ggml_fp16_t half[MOST];
            memcpy(half, r.query, sizeof(half));
            ggml_cpu_fp16_to_fp32(half, r.query, k.ne[0]);
        }
    }

    static void convert(const ggml_tensor & t, const char * from, int n, block & to) {
        const auto to_float = ggml_get_type_traits(t.type)->to_float;
        for (int i = 0; i < n; i++, from += t.nb[1]) {
            t.type == GGML_TYPE_F16 ? ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) from, to[i], t.ne[0])
                                    : to_float(from, to[i], t.ne[0]);
        }
    }

    void weigh(row & r, const char * key, const block & keys, positions & p) const {
        const auto  dot   = ggml_get_type_traits_cpu(k.type)->vec_dot;
        const float scale = params[2] != 0.0F ? params[0] / params[2] : params[0];
        if (k.type == GGML_TYPE_F16) {
            multiply_keys(r.query, keys, k.ne[0], p);
        }
        for (int i = 0; i < p.n; i++) {
            if (k.type != GGML_TYPE_F16) {
                dot(int(k.ne[0]), p.score + i, 0, key + p.i[i] * k.nb[1], 0, r.query, 0, 1);
            }
            const float s = p.score[i] * scale;
            r.add((params[2] != 0.0F ? params[2] * tanhf(s) : s) + p.mask[i], p.scale[i], p.factor[i]);
        }
    }

    void finish(row & r, float * part) const {
        const int n = int(v.ne[0]);
        if (part) {
            part[0] = r.M;
            part[1] = r.S;
        } else {
            ggml_vec_scale_f32(n, r.sum, r.S == 0.0F ? 0.0F : 1.0F / r.S);
        }
        memcpy(part ? part + 2 : r.to, r.sum, n * sizeof(float));
    }
};

} // namespace

bool ggml_cpu_attention(ggml_tensor * op, int ir0, int ir1, int64_t ic0, int64_t ic1, float * parts, int64_t stride) {
    const attention all = { *op };
    ir1 = !parts ? ir1 : ir0 == 0 ? int(op->src[0]->ne[2]) : ir0; // ggml calls for one row after the other
    const bool is_ours = all.is_ours();
    for (; ir0 < ir1 && is_ours; ir0 += ROWS) {
        all.compute(ir0, std::min(ROWS, ir1 - ir0), ic0, ic1, parts, stride);
    }
    return is_ours;
}
#else
bool ggml_cpu_attention(ggml_tensor *, int, int, int64_t, int64_t, float *, int64_t) {
    return false;
}
#endif
