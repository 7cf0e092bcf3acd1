// SPDX-License-Identifier: MIT
// Products of f16 weights and several rows of activations: of experts, and of keys and values that heads share.
#include "plain-rows.h"
#include "vec.h"

#include <algorithm>
#include <cstring>

#if defined(__AVX512F__)

namespace {

constexpr int     LANES       = GGML_F16_DOT_EPR;
constexpr int     WEIGHT_ROWS = 2;                     // multiplied at once
constexpr int     MOST_INPUTS = 3;                     // rows of activations multiplied at once: sums stay in registers
constexpr int     ROWS        = LANES;                 // rows of weights for which activations are converted
constexpr int     INPUT_BLOCK = 8;                     // rows of activations that are converted
constexpr int64_t COLUMNS     = 8 * GGML_F16_DOT_STEP; // that are converted: they stay in the first cache

using sums = __m512[GGML_F16_DOT_ARR];

struct block {
    float w[WEIGHT_ROWS][COLUMNS], y[INPUT_BLOCK][COLUMNS];
    sums  sum[INPUT_BLOCK][ROWS]; // complete, the first vector has all
};

// As ggml_cpu_fp16_to_fp32, inlined: its call took a sixth of the kernel's time.
void convert(const void * from, int64_t n, float * to) {
    for (int64_t i = 0; i < n; i += LANES) {
        _mm512_storeu_ps(to + i, GGML_F16_DOT_VEC_LOAD((const ggml_fp16_t *) from + i, 0));
    }
}

// Adds the products of n columns to the sums of T rows of activations and two of weights, as ggml_vec_dot_f16 does.
template <int T>
void add_products(block & b, int row, int64_t x, int64_t n, bool is_first, bool is_last) {
    constexpr int N = GGML_F16_DOT_ARR;
    __m512        sum[T][WEIGHT_ROWS][N];
    for (int t = 0; t < T; t++) {
        for (int k = 0; k < WEIGHT_ROWS; k++) {
            for (int j = 0; j < N; j++) {
                sum[t][k][j] = is_first ? _mm512_setzero_ps() : b.sum[row + t][x + k][j];
            }
        }
    }
    for (int64_t i = 0; i < n; i += N * LANES) {
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            __m512 w[WEIGHT_ROWS];
#pragma GCC unroll 2
            for (int k = 0; k < WEIGHT_ROWS; k++) {
                w[k] = _mm512_loadu_ps(b.w[k] + i + j * LANES);
                asm("" : "+v"(w[k])); // else GCC loads it again for each row
            }
#pragma GCC unroll 3
            for (int t = 0; t < T; t++) {
                __m512 y = _mm512_loadu_ps(b.y[row + t] + i + j * LANES);
                asm("" : "+v"(y));
#pragma GCC unroll 2
                for (int k = 0; k < WEIGHT_ROWS; k++) {
                    sum[t][k][j] = _mm512_fmadd_ps(w[k], y, sum[t][k][j]);
                }
            }
        }
    }
    for (int t = 0; t < T; t++) {
        for (int k = 0; k < WEIGHT_ROWS; k++) {
            sums & to = b.sum[row + t][x + k];
            for (int j = 0; j < N && !is_last; j++) {
                to[j] = sum[t][k][j];
            }
            if (is_last) {
                to[0] = (sum[t][k][0] + sum[t][k][2]) + (sum[t][k][1] + sum[t][k][3]);
            }
        }
    }
}

// The sum of each row's lanes, added in the order of _mm512_reduce_add_ps.
__m512 add_lanes(const sums * rows) {
    __m512 x[ROWS];
    for (int i = 0; i < ROWS; i++) {
        x[i] = rows[i][0];
    }
#pragma GCC unroll 4
    for (int half = LANES / 2; half > 0; half /= 2) { // lanes of each row that remain
        int32_t lanes[LANES];
        for (int i = 0; i < LANES; i++) {
            lanes[i] = i / 8 * LANES + i % 8 / half * 2 * half + i % half;
        }
        const __m512i low = _mm512_loadu_si512(lanes), high = _mm512_add_epi32(low, _mm512_set1_epi32(half));
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) {
            x[i] = _mm512_permutex2var_ps(x[2 * i], low, x[2 * i + 1]) +
                   _mm512_permutex2var_ps(x[2 * i], high, x[2 * i + 1]);
        }
    }
    return x[0];
}

// Adds the products of columns, and of at most ROWS rows of weights and INPUT_BLOCK converted rows of activations.
// `next`: bytes from a row to what will be read thereafter.
void add_rows(block & b, const char * vx, size_t bx, ptrdiff_t next, int nr, int64_t nc, int64_t n, bool is_first,
              bool is_last) {
    for (int64_t x = 0; x < nc; x += WEIGHT_ROWS) {
        for (int k = 0; k < WEIGHT_ROWS; k++) {
            const char * row = vx + std::min(x + k, nc - 1) * bx;
            convert(row, n, b.w[k]);
            for (int64_t i = 0; i < n; i += 64 / sizeof(ggml_fp16_t)) {
                __builtin_prefetch(row + next + i * sizeof(ggml_fp16_t), 0, 2);
            }
        }
        int row = 0;
        for (; row + MOST_INPUTS <= nr; row += MOST_INPUTS) {
            add_products<MOST_INPUTS>(b, row, x, n, is_first, is_last);
        }
        if (nr - row == 2) {
            add_products<2>(b, row, x, n, is_first, is_last);
        } else if (nr - row == 1) {
            add_products<1>(b, row, x, n, is_first, is_last);
        }
    }
}

void multiply_rows(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                   int64_t nc) {
    block b;
    for (int64_t x = 0; x < nc; x += ROWS) {
        const int64_t n_rows = std::min<int64_t>(ROWS, nc - x);
        for (int64_t first = 0; first < n; first += COLUMNS) {
            const int64_t n_columns = std::min(COLUMNS, n - first);
            const bool    is_last   = first + n_columns == n;
            for (int i = 0; i < nr && (x == 0 || n > COLUMNS); i++) {
                convert((const ggml_fp16_t *) vy[i] + first, n_columns, b.y[i]);
            }
            add_rows(b, vx + x * bx + first * sizeof(ggml_fp16_t), bx,
                     (is_last ? ROWS * bx - first * sizeof(ggml_fp16_t) : COLUMNS * sizeof(ggml_fp16_t)), nr, n_rows,
                     n_columns, first == 0, is_last);
        }
        for (int i = 0; i < nr; i++) {
            const __m512 all = add_lanes(b.sum[i]);
            memcpy(s[i] + x, &all, n_rows * sizeof(float));
        }
    }
}

void multiply(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr, int64_t nc) {
    if (n % GGML_F16_DOT_STEP == 0) {
        for (int i = 0; i < nr; i += INPUT_BLOCK) {
            multiply_rows(n, s + i, vx, bx, vy + i, std::min(INPUT_BLOCK, nr - i), nc);
        }
        return;
    }
    for (int i = 0; i < nr; i++) {
        for (int64_t x = 0; x < nc; x++) {
            ggml_vec_dot_f16(int(n), s[i] + x, 0, (ggml_fp16_t *) (vx + x * bx), 0, (ggml_fp16_t *) vy[i], 0, 1);
        }
    }
}

} // namespace

extern const plain_kernel f16_kernel = { GGML_TYPE_F16, nullptr, multiply, INT64_MAX, INT64_MAX };
#endif
