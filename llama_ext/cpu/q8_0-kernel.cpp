// SPDX-License-Identifier: MIT
#include "lanes.h"
#include "plain-rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(HAS_ROW_LANES) && HAS_VNNI

// LOAD_ROWS loads a block of one row, or of two; EVEN and ODD take every other quarter, or half, of two vectors.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define LOAD_ROWS(load, row) _mm512_inserti64x4(_mm512_castsi256_si512(load(row)), load(row + 4), 1)
#define LOAD_HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) (p)))
#define EVEN(a, b) _mm512_shuffle_i32x4(a, b, 0x88)
#define ODD(a, b) _mm512_shuffle_i32x4(a, b, 0xdd)
#else
#define LOAD_ROWS(load, row) load(row)
#define LOAD_HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) (p)))
#define EVEN(a, b) _mm256_permute2x128_si256(a, b, 0x20)
#define ODD(a, b) _mm256_permute2x128_si256(a, b, 0x31)
#endif

namespace {

// ggml adds the products of four columns, then those of each block, into eight sums.
constexpr int FOURS = 8;

constexpr int BLOCKS     = 16;   // a row's, rearranged at once, so that they stay in the first cache
constexpr int ROW_BLOCKS = 4096; // the most blocks of all rows of activations that are multiplied at once

struct activations {
    const block_q8_0 * values[PLAIN_ROWS];
    float              d[ROW_BLOCKS];
    int32_t            sums[ROW_BLOCKS][FOURS]; // times -128
};

struct weights {
    int_lanes   u[BLOCKS][FOURS]; // plus 128, as the instruction takes unsigned ones
    float_lanes d[BLOCKS];
};

using accumulators = float_lanes[FOURS];

void prepare(activations & y, const void * const * vy, int nr, int64_t n_blocks) {
    for (int i = 0; i < nr; i++) {
        y.values[i] = (const block_q8_0 *) vy[i];
        for (int64_t b = 0; b < n_blocks; b++) {
            const block_q8_0 & block = y.values[i][b];
            const __m256i      qs    = _mm256_loadu_si256((const __m256i *) block.qs);
            const __m256i      pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), qs);
            const __m256i      fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-128));
            _mm256_storeu_si256((__m256i *) y.sums[i * n_blocks + b], fours);
            y.d[i * n_blocks + b] = GGML_CPU_FP16_TO_FP32(block.d);
        }
    }
}

// Rearranges n blocks of the rows p, and fetches those that come to_next bytes later.
void rearrange(weights & w, const block_q8_0 * const * p, int64_t first, int n, size_t to_next) {
    ggml_half d[BLOCKS][LANES];
    for (int b = 0; b < n; b++) {
        for (int row = 0; row < LANES; row++) {
            const block_q8_0 * block = p[row] + first + b;
            d[b][row]                = block->d;
            if (b % 2 == 0) { // two blocks are a line of the cache, and four bytes
                __builtin_prefetch((const char *) block + to_next, 0, 2);
            }
        }
        const auto load = [&](int row) { return _mm256_loadu_si256((const __m256i *) p[row][first + b].qs); };
        int_vector fours[2][4]; // columns 4j to 4j + 3 of four rows, then columns 4j + 16 to 4j + 19
        for (int half = 0; half < 2; half++) {
            int_lanes x[4];
            for (int j = 0; j < 4; j++) {
                x[j] = (int_lanes) LOAD_ROWS(load, LANES / 2 * half + j) ^ int32_t(0x80808080);
            }
            const auto low_01  = UNPACK(lo, 32, x[0], x[1]);
            const auto low_23  = UNPACK(lo, 32, x[2], x[3]);
            const auto high_01 = UNPACK(hi, 32, x[0], x[1]);
            const auto high_23 = UNPACK(hi, 32, x[2], x[3]);
            fours[half][0]     = UNPACK(lo, 64, low_01, low_23);
            fours[half][1]     = UNPACK(hi, 64, low_01, low_23);
            fours[half][2]     = UNPACK(lo, 64, high_01, high_23);
            fours[half][3]     = UNPACK(hi, 64, high_01, high_23);
        }
        for (int j = 0; j < 4; j++) {
            w.u[b][j]     = (int_lanes) EVEN(fours[0][j], fours[1][j]);
            w.u[b][j + 4] = (int_lanes) ODD(fours[0][j], fours[1][j]);
        }
    }
    for (int b = 0; b < n; b++) {
        w.d[b] = (float_lanes) LOAD_HALVES(d[b]);
    }
}

// Adds the products of n blocks and T rows of activations.
template <int T>
inline void multiply(const weights & w, const activations & y, int row, int64_t n_blocks, int64_t first, int n,
                     accumulators * acc) {
    float_lanes sum[T][FOURS];
    memcpy(sum, acc, sizeof(sum));
    for (int b = 0; b < n; b++) {
        float_lanes d[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            d[t] = w.d[b] * y.d[(row + t) * n_blocks + first + b];
        }
#pragma GCC unroll 8
        for (int j = 0; j < FOURS; j++) {
            int_lanes u = w.u[b][j];
            asm("" : "+v"(u)); // else GCC loads it again for each row
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                const int_lanes x = four_values(y.values[row + t][first + b].qs + 4 * j);
                const int_lanes s = int_lanes{} + y.sums[(row + t) * n_blocks + first + b][j];
                sum[t][j]         = multiply_add(dot(s, u, x), d[t], sum[t][j]);
            }
        }
    }
    memcpy(acc, sum, sizeof(sum));
}

void multiply_rows(int64_t n_blocks, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                   int64_t nc) {
    activations  y;
    weights      w;
    accumulators acc[PLAIN_ROWS];
    prepare(y, vy, nr, n_blocks);
    for (int64_t x = 0; x < nc; x += LANES) {
        const int          n_rows = int(std::min<int64_t>(LANES, nc - x));
        const block_q8_0 * p[LANES];
        for (int i = 0; i < LANES; i++) {
            p[i] = (const block_q8_0 *) (vx + (x + std::min(i, n_rows - 1)) * bx);
        }
        memset((void *) acc, 0, sizeof(acc[0]) * nr);
        for (int64_t first = 0; first < n_blocks; first += BLOCKS) {
            const int n = int(std::min<int64_t>(BLOCKS, n_blocks - first));
            rearrange(w, p, first, n, LANES * bx);
            for (int i = 0; i + 2 <= nr; i += 2) {
                multiply<2>(w, y, i, n_blocks, first, n, acc + i);
            }
            if (nr % 2 == 1) {
                multiply<1>(w, y, nr - 1, n_blocks, first, n, acc + nr - 1);
            }
        }
        for (int i = 0; i < nr; i++) {
            const float_lanes * l   = acc[i];
            const float_lanes   all = ((l[4] + l[0]) + (l[6] + l[2])) + ((l[5] + l[1]) + (l[7] + l[3]));
            memcpy(s[i] + x, &all, sizeof(float) * n_rows);
        }
    }
}

void multiply(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr, int64_t nc) {
    const int64_t n_blocks = n / QK8_0;
    const int     at_once  = int(std::min<int64_t>(PLAIN_ROWS, ROW_BLOCKS / n_blocks));
    for (int i = 0; i < nr; i += at_once) {
        multiply_rows(n_blocks, s + i, vx, bx, vy + i, std::min(at_once, nr - i), nc);
    }
}

} // namespace

extern const plain_kernel q8_0_kernel = { GGML_TYPE_Q8_0, nullptr, multiply, 4, ROW_BLOCKS * QK8_0 };
#endif
