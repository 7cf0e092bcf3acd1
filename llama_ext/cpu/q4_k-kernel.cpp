// SPDX-License-Identifier: MIT
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

namespace {

using weights = weights_K<block_q4_K, 8, 4>;

void unpack(weights & w, const row_lanes & rows, int64_t b, int64_t) {
    int_lanes head[4]; // d and dmin, and 12 bytes of scales and mins
    load_words(head, rows, b * sizeof(block_q4_K));
    w.d                      = halves(head[0]);
    w.dmin                   = halves(head[0] >> 16);
    const int_lanes scales[] = { head[1] & 0x3f3f3f3f, (head[3] & 0x0f0f0f0f) | (head[1] >> 6 & 0x03030303) << 4 };
    const int_lanes mins[]   = { head[2] & 0x3f3f3f3f, (head[3] >> 4 & 0x0f0f0f0f) | (head[2] >> 6 & 0x03030303) << 4 };
    for (int i = 0; i < 8; i++) {
        w.scales[i] = scales[i / 4] >> i % 4 * 8 & 0xff;
    }
    for (int i = 0; i < 4; i++) {
        const int_lanes two = mins[i / 2] >> i % 2 * 16;
        w.mins[i]           = (two & 0xff) | (two & 0xff00) << 8;
    }
}

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int part) {
    for (int j = 0; j < 8; j += 4) {
        int_lanes words[4];
        load_words(words, rows, offset + offsetof(block_q4_K, qs) + 32 * part + 4 * j);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            to[0].u[j + k] = words[k] & 0x0f0f0f0f;
            to[1].u[j + k] = words[k] >> 4 & 0x0f0f0f0f;
        }
    }
}

// A product is added up by blocks, as ggml's kernels do; by quarters of blocks where rows are stored by fours.
template <int T, typename row_block, typename F>
inline void multiply_block(const weights & w, const activations & y, int64_t b, accumulators & acc, int first, F sub) {
    int_lanes sums[T] = {}, mins[T] = {};
    static_assert(columns_of_sum(15) == 32, "a sub-block needs one sum");
    const int8_t * a[T];
    for (int t = 0; t < T; t++) {
        a[t] = y.values[first + t] + b * y.block_size;
    }
    for (int quarter = 0; quarter < 4; quarter++) {
        const columns * two = sub(quarter);
        for (int i = 0; i < 2; i++) {
            int_lanes part[T] = {};
            multiply_columns<32, T, STEP<row_block>>(two[i], 0, a, part);
            for (int t = 0; t < T; t++) {
                a[t]    += 4 * STEP<row_block>;
                sums[t] += scaled(part[t], w.scales[2 * quarter + i]);
            }
        }
        for (int t = 0; t < T; t++) {
            mins[t] = add_pairs(mins[t], int_lanes{} + y.sum_of(4 * b + quarter, first + t), w.mins[quarter]);
            if (STEP<row_block> == 32 || quarter == 3) {
                add_scaled(acc, first + t, w, y.d_of(b, first + t), sums[t], mins[t]);
            }
        }
    }
}

// Sums are those of two sub-blocks, 16 bits each. The first argument is there for its type.
template <typename row_block>
void prepare(const weights &, activations & y, int row, const row_block * a, int64_t n_blocks) {
    prepare_row(y, row, a, n_blocks);
    for (int64_t i = 0; i < 4 * n_blocks; i++) {
        const int16_t * of16 = sums_of_quarter(a[i / 4], int(i % 4), row % 4);
        y.sum_of(i, row)     = pair_of(of16[0] + of16[1], of16[2] + of16[3]);
    }
}

//
// One row of activations: each row of weights by itself, since memory is fastest in its own order.
//

constexpr int N_VECTORS = QK_K / 2 / sizeof(int_vector); // that hold a block's nibbles
constexpr int N_SUB     = sizeof(int_vector) / 32;       // sub-blocks of a vector's low nibbles

// Values of sub-blocks' columns in the order of nibbles: a vector's low ones, then its high ones.
template <typename T, int size>
using by_nibbles = T[N_VECTORS][2][N_SUB][size];

template <typename T, int size>
constexpr auto & sub_block(by_nibbles<T, size> & all, int i) {
    return all[i / 2 / N_SUB][i % 2][i / 2 % N_SUB];
}

struct alignas(64) ordered_activations {
    by_nibbles<int8_t, 32> values;
    int16_t                sums[8]; // a sub-block's each
    float                  d;

    void set(const block_q8_K & a) {
        for (int i = 0; i < 8; i++) {
            memcpy(sub_block<int8_t, 32>(values, i), a.qs + 32 * i, 32);
            sums[i] = a.bsums[2 * i] + a.bsums[2 * i + 1];
        }
        d = a.d;
    }
};

// Each lane of 16 bits finds its sub-block's scale among eight bytes.
struct places_of_scales {
    alignas(64) by_nibbles<int16_t, 16> at = {};

    constexpr places_of_scales() {
        for (int i = 0; i < 8; i++) {
            for (int16_t & place : sub_block<int16_t, 16>(at, i)) {
                place = int16_t(0x8000 | i); // the high byte is zero
            }
        }
    }
};

inline __m128i add_quarters(int_lanes x) {
    const __m256i eight = eight_lanes(x);
    return _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
}

// Eight bytes of six bits: a word's four, and four whose low bits are in another word.
inline uint64_t unpack_six_bits(uint32_t word, uint32_t low) {
    return (word & 0x3f3f3f3f) | uint64_t((low & 0x0f0f0f0f) | (word >> 2 & 0x30303030)) << 32;
}

// Adds a block's product to the first sum, and what is to be subtracted in the end to the second.
inline __m128 add_product(__m128 acc, const block_q4_K & w, const ordered_activations & y) {
    static constexpr places_of_scales places;
    typedef uint64_t                  eight_bytes __attribute__((vector_size(4 * LANES)));
    uint32_t                          head[4]; // d and dmin, and 12 bytes of scales and mins
    memcpy(head, &w, sizeof(head));
    const auto scales = (int_vector) (eight_bytes{} + unpack_six_bits(head[1], head[3]));
    int_lanes  sums   = {};
#pragma GCC unroll 4
    for (int i = 0; i < N_VECTORS; i++) {
        const auto nibbles = (int_lanes) load_vector(w.qs + i * sizeof(int_vector));
#pragma GCC unroll 2
        for (int high = 0; high < 2; high++) {
            const auto u     = (int_vector) (nibbles >> 4 * high & 0x0f0f0f0f);
            const auto pairs = LANES_INTRINSIC(maddubs_epi16)(u, load_vector(y.values[i][high]));
            const auto scale = LANES_INTRINSIC(shuffle_epi8)(scales, load_vector(places.at[i][high]));
            sums             = add_pairs(sums, (int_lanes) pairs, (int_lanes) scale);
        }
    }
    const __m128i mins  = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(int64_t(unpack_six_bits(head[2], head[3] >> 4))));
    const __m128i min   = _mm_madd_epi16(mins, _mm_loadu_si128((const __m128i *) y.sums));
    const __m128i pairs = _mm_hadd_epi32(add_quarters(sums), min);
    const __m128  two   = _mm_cvtepi32_ps(_mm_hadd_epi32(pairs, pairs));
    const __m128  d     = _mm_mul_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(int32_t(head[0]))), _mm_set1_ps(y.d));
    return _mm_fmadd_ps(two, d, acc);
}

// A plain_multiply.
void multiply_q4_K(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                   int64_t nc) {
    if (nr != 1) {
        multiply_all<weights, block_q8_K>(n, s, vx, bx, vy, nr, nc);
        return;
    }
    ordered_activations y[MOST_BLOCKS / 4 * 32 / QK_K];
    for (int64_t b = 0; b < n / QK_K; b++) {
        y[b].set(((const block_q8_K *) vy[0])[b]);
    }
    for (int64_t x = 0; x < nc; x++) {
        const auto * row = (const block_q4_K *) (vx + x * bx);
        __m128       acc = _mm_setzero_ps();
        for (int64_t b = 0; b < n / QK_K; b++) {
            acc = add_product(acc, row[b], y[b]);
        }
        s[0][x] = acc[0] - acc[1];
    }
}

constexpr plain_kernel with_one_row(plain_kernel kernel) {
    kernel.repacked = multiply_q4_K;
    return kernel;
}

} // namespace

extern const plain_kernel q4_k_kernel = with_one_row(repacked_kernel<weights>(GGML_TYPE_Q4_K));
#endif
