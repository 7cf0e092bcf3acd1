// SPDX-License-Identifier: MIT
#pragma once

// Products of weights as files have them, a row of weights in each lane of a vector; for kernels' sources alone. Their
// bits are those of ggml's products of repacked weights: integers are exact, and floats are added in the same order.

#include "lanes.h"
#include "plain-rows.h"
#include "repack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef HAS_ROW_LANES

namespace {

// The columns whose products fit into a sum, if weights are at most `most`.
constexpr int columns_of_sum(int most) {
    return HAS_VNNI || 16 * most * 128 <= INT16_MAX ? 32 : 16;
}

// Adds products of pairs of 16 bits to sums.
inline int_lanes add_pairs(int_lanes sums, int_lanes a, int_lanes b) {
    return (int_lanes) DPWSSD((int_vector) sums, (int_vector) a, (int_vector) b);
}

// Each lane's sum in 32 bits, times a scale of 16 bits.
inline int_lanes scaled(int_lanes sums, int_lanes scale) {
    return HAS_VNNI ? sums * scale : add_pairs(int_lanes{}, sums, (scale & 0xffff) | scale << 16);
}

//
// weights
//

// The half floats in the low 16 bits of lanes.
inline float_lanes halves(int_lanes x) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((int_vector) x));
#else
    const __m256i low = (__m256i) (x & 0xffff);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#endif
}

// Where the rows of a vector's lanes begin, four by four.
struct row_lanes {
    const char * fours[LANES / 4];
    size_t       stride; // bytes between the rows of a four

    const char * operator[](int i) const { return fours[i / 4] + i % 4 * stride; }
};

// Stores n values of each row, size bytes apart: to[i] gets number i of all rows.
template <typename T>
inline void gather(T (*to)[LANES], const row_lanes & rows, size_t offset, size_t size, int n) {
    for (int i = 0; i < LANES; i++) {
        const char * from = rows[i] + offset;
        asm("" : "+r"(from)); // else GCC takes a value of each row in turn, and keeps their addresses in memory
#pragma GCC unroll 16
        for (int j = 0; j < n; j++) {
            memcpy(&to[j][i], from + j * size, sizeof(T));
        }
    }
}

inline int_lanes load_lanes(const uint16_t * p) {
    return (int_lanes) LANES_INTRINSIC(cvtepu16_epi32)(*(const half_vector *) p);
}

// Sixteen bytes of each row: to[j] gets word j of the four.
inline void load_words(int_lanes * to, const row_lanes & rows, size_t offset) {
    int_vector v[4];
    const auto load = [&](int row) { return _mm_loadu_si128((const __m128i *) (rows[row] + offset)); };
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        v[i] = _mm512_inserti32x4(_mm512_castsi128_si512(load(i)), load(i + 4), 1);
        v[i] = _mm512_inserti32x4(_mm512_inserti32x4(v[i], load(i + 8), 2), load(i + 12), 3);
#else
        v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(load(i)), load(i + 4), 1);
#endif
    }
    const int_vector low_01 = UNPACK(lo, 32, v[0], v[1]), high_01 = UNPACK(hi, 32, v[0], v[1]);
    const int_vector low_23 = UNPACK(lo, 32, v[2], v[3]), high_23 = UNPACK(hi, 32, v[2], v[3]);
    to[0] = (int_lanes) UNPACK(lo, 64, low_01, low_23);
    to[1] = (int_lanes) UNPACK(hi, 64, low_01, low_23);
    to[2] = (int_lanes) UNPACK(lo, 64, high_01, high_23);
    to[3] = (int_lanes) UNPACK(hi, 64, high_01, high_23);
}

// Unsigned values of 32 columns: u[j] has columns 4j to 4j + 3.
struct columns {
    int_lanes u[8];
};

//
// activations
//

// Rows of activations, stored each by itself or four of them in turn, eight values each.
template <typename row_block>
constexpr int STEP = std::is_same_v<row_block, block_q8_Kx4> || std::is_same_v<row_block, block_q8_0x4> ? 32 : 8;

// The most blocks of 32 values of all rows that are multiplied at once.
constexpr int MOST_BLOCKS = 8192;

struct activations {
    const int8_t * values[PLAIN_ROWS]; // a row's first eight; the next eight are STEP bytes later
    size_t         block_size;         // in bytes
    int            n_rows;
    float          d[MOST_BLOCKS];    // scales of blocks
    int32_t        sums[MOST_BLOCKS]; // see prepare

    float & d_of(int64_t block, int row) { return d[block * n_rows + row]; }
    float   d_of(int64_t block, int row) const { return d[block * n_rows + row]; }

    int32_t & sum_of(int64_t part, int row) { return sums[part * n_rows + row]; }
    int32_t   sum_of(int64_t part, int row) const { return sums[part * n_rows + row]; }
};

inline float scale(const block_q8_K & a, int) {
    return a.d;
}
inline float scale(const block_q8_Kx4 & a, int row) {
    return a.d[row];
}
inline float scale(const block_q8_0 & a, int) {
    return GGML_CPU_FP16_TO_FP32(a.d);
}
inline float scale(const block_q8_0x4 & a, int row) {
    return GGML_CPU_FP16_TO_FP32(a.d[row]);
}

// Sets all but the sums of a row.
template <typename row_block>
void prepare_row(activations & y, int row, const row_block * a, int64_t n_blocks) {
    y.values[row] = (const int8_t *) a + offsetof(row_block, qs) + (STEP<row_block> == 8 ? 0 : row % 4 * 8);
    y.block_size  = sizeof(row_block);
    for (int64_t b = 0; b < n_blocks; b++) {
        y.d_of(b, row) = scale(a[b], row % 4);
    }
}

// Sums of 16 activations each, four of them.
inline const int16_t * sums_of_quarter(const block_q8_K & a, int i, int) {
    return a.bsums + 4 * i;
}
inline const int16_t * sums_of_quarter(const block_q8_Kx4 & a, int i, int row) {
    return a.bsums + 16 * i + 4 * row;
}

inline int32_t pair_of(int low, int high) {
    return int32_t(uint16_t(low) | uint32_t(high) << 16);
}

// Adds products of N columns, beginning with `first`, and T rows of activations to sums.
template <int N, int T, int step>
inline void multiply_columns(const columns & w, int first, const int8_t * const * a, int_lanes * sums) {
#pragma GCC unroll 8
    for (int j = first / 4; j < (first + N) / 4; j++) {
        const int_lanes u = w.u[j];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            sums[t] = dot(sums[t], u, four_values(a[t] + j / 2 * step + j % 2 * 4));
        }
    }
}

// Sums of rows of activations so far.
struct accumulators {
    float_lanes sum[PLAIN_ROWS];
    float_lanes min[PLAIN_ROWS]; // to be subtracted
};

// Calls f with a number of rows, a constant, and the first of them until it has had all.
template <typename F>
inline void for_rows(int nr, F f) {
    int i = 0;
    for (; i + 4 <= nr; i += 4) {
        f(std::integral_constant<int, 4>(), i);
    }
    for (; i + 2 <= nr; i += 2) {
        f(std::integral_constant<int, 2>(), i);
    }
    for (; i < nr; i++) {
        f(std::integral_constant<int, 1>(), i);
    }
}

//
// types of 32 values with one scale
//

// `offset` is added to each value, so that it lies between 0 and `most`.
template <typename block_type, int offset, int most>
struct weights_32 {
    using block                = block_type;
    using row                  = block_q8_0;
    using four_rows            = block_q8_0x4;
    static constexpr int BLOCK = 32, OFFSET = offset;
    static constexpr int N_PARTS = 1, N_SUB = 1; // parts of a block are unpacked at once, each with N_SUB of columns
    static constexpr int N_SCALES = 16;          // blocks of a row whose scales are gathered at once
    uint16_t             scales[N_SCALES][LANES];
    float_lanes          d;
};

// The scales of a block, in the low 16 bits.
template <typename weights>
inline int_lanes scales_of(weights & w, const row_lanes & rows, int64_t b, int64_t n_blocks) {
    if (b % w.N_SCALES == 0) {
        constexpr size_t size = sizeof(typename weights::block);
        if (b + w.N_SCALES <= n_blocks) {
            gather(w.scales, rows, b * size, size, w.N_SCALES);
        } else {
            gather(w.scales, rows, b * size, size, int(n_blocks - b));
        }
    }
    return load_lanes(w.scales[b % w.N_SCALES]);
}

// For scales that are half floats; other types have an unpack of their own.
template <typename block, int offset, int most>
inline void unpack(weights_32<block, offset, most> & w, const row_lanes & rows, int64_t b, int64_t n_blocks) {
    w.d = halves(scales_of(w, rows, b, n_blocks));
}

inline int_lanes look_up(__m128i table, int_lanes i) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (int_lanes) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (int_vector) i);
#else
    return (int_lanes) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (int_vector) i);
#endif
}

// value: makes unsigned values of nibbles.
template <typename F>
inline void unpack_nibbles(columns & to, const row_lanes & rows, size_t offset, F value) {
    int_lanes words[4];
    load_words(words, rows, offset);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        to.u[j]     = value(words[j] & 0x0f0f0f0f);
        to.u[j + 4] = value(words[j] >> 4 & 0x0f0f0f0f);
    }
}

// The values of nibbles in a table.
template <typename weights>
inline void unpack_by_table(columns & to, const row_lanes & rows, size_t offset, const int8_t * table) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i *) table), _mm_set1_epi8(weights::OFFSET));
    unpack_nibbles(to, rows, offset, [&](int_lanes nibbles) { return look_up(values, nibbles); });
}

// sub: returns the columns of a part.
template <int T, typename row_block, typename block, int offset, int most, typename F>
inline void multiply_block(const weights_32<block, offset, most> & w, const activations & y, int64_t b,
                           accumulators & acc, int first, F sub) {
    const int8_t * a[T];
    int_lanes      sums[T];
    for (int t = 0; t < T; t++) {
        a[t]    = y.values[first + t] + b * y.block_size;
        sums[t] = int_lanes{} + y.sum_of(b, first + t);
    }
    const columns & all = *sub(0);
    constexpr int   N   = T <= 2 ? 16 : columns_of_sum(most); // few rows need short chains of sums
#pragma GCC unroll 2
    for (int i = 0; i < 32; i += N) {
        int_lanes part[T] = {};
        multiply_columns<N, T, STEP<row_block>>(all, i, a, part);
        for (int t = 0; t < T; t++) {
            sums[t] += scaled(part[t], int_lanes{} + 1);
        }
    }
    for (int t = 0; t < T; t++) {
        acc.sum[first + t] = multiply_add(sums[t], w.d * y.d_of(b, first + t), acc.sum[first + t]);
    }
}

// Sums are those of blocks, times -offset. The first argument is there for its type.
template <typename row_block, typename block, int offset, int most>
void prepare(const weights_32<block, offset, most> &, activations & y, int row, const row_block * a, int64_t n_blocks) {
    prepare_row(y, row, a, n_blocks);
    const auto eight = [](const int8_t * p) { return _mm_loadl_epi64((const __m128i *) p); };
    for (int64_t b = 0; b < n_blocks; b++) {
        const int8_t * p     = y.values[row] + b * sizeof(row_block);
        const __m128i  ones  = _mm_set1_epi8(1);
        const __m128i  first = _mm_unpacklo_epi64(eight(p), eight(p + STEP<row_block>));
        const __m128i  last  = _mm_unpacklo_epi64(eight(p + 2 * STEP<row_block>), eight(p + 3 * STEP<row_block>));
        const __m128i  pairs = _mm_add_epi16(_mm_maddubs_epi16(ones, first), _mm_maddubs_epi16(ones, last));
        const __m128i  fours = _mm_madd_epi16(pairs, _mm_set1_epi16(-offset));
        const __m128i  two   = _mm_hadd_epi32(fours, fours);
        y.sum_of(b, row)     = _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
    }
}

//
// K-quants: blocks of 256 values, whose sub-blocks have scales and mins
//

template <typename block_type, int n_scales, int n_parts>
struct weights_K {
    using block                  = block_type;
    using row                    = block_q8_K;
    using four_rows              = block_q8_Kx4;
    static constexpr int BLOCK   = QK_K;
    static constexpr int N_PARTS = n_parts, N_SUB = 8 / n_parts;
    int_lanes            scales[n_scales];
    int_lanes            mins[n_scales / 2]; // pairs of sub-blocks, 16 bits each
    float_lanes          d, dmin;
};

// Adds what a part of a block has, which is 0 then.
template <typename weights>
inline void add_scaled(accumulators & acc, int row, const weights & w, float d, int_lanes & sums, int_lanes & mins) {
    acc.sum[row] = multiply_add(sums, w.d * d, acc.sum[row]);
    acc.min[row] = multiply_add(mins, w.dmin * d, acc.min[row]);
    sums = mins = int_lanes{};
}

//
// all types
//

// Fetches bytes into the second cache; any address may be given.
inline void fetch(const char * p, size_t size) {
    for (size_t i = 0; i < size; i += 64) {
        __builtin_prefetch(p + i, 0, 2);
    }
}

template <typename weights, typename row_block>
void multiply_rows(int64_t n_blocks, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                   int64_t nc) {
    constexpr size_t size = sizeof(typename weights::block);
    weights          w;
    columns          all[weights::N_PARTS * weights::N_SUB];
    activations      y;
    accumulators     acc;
    y.n_rows = nr;
    for (int i = 0; i < nr; i++) {
        prepare(w, y, i, (const row_block *) vy[i], n_blocks);
    }
    for (int64_t x = 0; x < nc; x += LANES) {
        const int n_lanes = int(std::min<int64_t>(LANES, nc - x));
        row_lanes rows    = { {}, bx };
        for (int i = 0; i < LANES; i += 4) { // the first again in the place of those that are missing
            rows.fours[i / 4] = vx + (x + i % n_lanes) * bx;
        }
        std::fill_n(acc.sum, nr, float_lanes{});
        std::fill_n(acc.min, nr, float_lanes{});
        for (int64_t b = 0; b < n_blocks; b++) {
            fetch(rows[0] + LANES * (bx + b * size), LANES * size); // the next rows, in their order
            unpack(w, rows, b, n_blocks);
            if (nr == 1) { // columns stay in registers
                columns some[weights::N_SUB];
                multiply_block<1, row_block>(w, y, b, acc, 0, [&](int part) {
                    unpack_part(some, rows, b * size, part);
                    return some;
                });
                continue;
            }
            for (int part = 0; part < weights::N_PARTS; part++) {
                unpack_part(all + part * weights::N_SUB, rows, b * size, part);
            }
            for_rows(nr, [&](auto count, int first) {
                multiply_block<decltype(count)::value, row_block>(w, y, b, acc, first, [&](int part) {
                    return all + part * weights::N_SUB;
                });
            });
        }
        for (int i = 0; i < nr; i++) {
            const float_lanes all = acc.sum[i] - acc.min[i];
            for (int j = 0; j < n_lanes; j += 4) {
                memcpy(s[i] + x + j, (const float *) &all + j, 4 * sizeof(float));
            }
        }
    }
}

// A plain_multiply.
template <typename weights, typename row_block>
void multiply_all(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                  int64_t nc) {
    const int at_once = int(std::min<int64_t>(PLAIN_ROWS, MOST_BLOCKS / (n / 32)) / 4 * 4);
    for (int i = 0; i < nr; i += at_once) {
        multiply_rows<weights, row_block>(n / weights::BLOCK, s + i, vx, bx, vy + i, std::min(at_once, nr - i), nc);
    }
}

template <typename weights>
constexpr plain_kernel repacked_kernel(ggml_type type) {
    constexpr int64_t most_columns = MOST_BLOCKS / 4 * 32;
    return { type,
             nullptr,
             nullptr,
             0,
             most_columns,
             multiply_all<weights, typename weights::row>,
             multiply_all<weights, typename weights::four_rows> };
}

} // namespace
#endif
