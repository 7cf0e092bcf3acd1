// SPDX-License-Identifier: MIT
#include "repacked-x86.h"

#include <cstddef>
#include <type_traits>

#ifdef GGML_HAS_REPACKED_ROWS

namespace {

// Vectors have a lane for each row of weights. They take one or two groups of eight rows.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES_INTRINSIC(name) _mm512_##name
constexpr int GROUPS = 2;
using int_vector     = __m512i;
#else
#define LANES_INTRINSIC(name) _mm256_##name
constexpr int GROUPS = 1;
using int_vector     = __m256i;
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_VNNI true
#define DPBUSD LANES_INTRINSIC(dpbusd_epi32)
#define DPWSSD LANES_INTRINSIC(dpwssd_epi32)
#elif defined(__AVXVNNI__) && !defined(__AVX512BW__)
#define HAS_VNNI true
#define DPBUSD _mm256_dpbusd_avx_epi32
#define DPWSSD _mm256_dpwssd_avx_epi32
#else
#define HAS_VNNI false
#define DPBUSD(sums, u, a) LANES_INTRINSIC(add_epi16)(sums, LANES_INTRINSIC(maddubs_epi16)(u, a))
#define DPWSSD(sums, a, b) LANES_INTRINSIC(add_epi32)(sums, LANES_INTRINSIC(madd_epi16)(a, b))
#endif

typedef int32_t int_lanes __attribute__((vector_size(32 * GROUPS)));
typedef float   float_lanes __attribute__((vector_size(32 * GROUPS)));

// Adds products of unsigned bytes u and signed bytes a to sums. With VNNI a sum has 32 bits and four products, else 16
// bits and two.
inline int_lanes dot(int_lanes sums, int_lanes u, int_lanes a) {
    return (int_lanes) DPBUSD((int_vector) sums, (int_vector) u, (int_vector) a);
}

// The columns whose products fit into a sum, if weights are at most `most`.
constexpr int columns_of_sum(int most) {
    return HAS_VNNI || 16 * most * 128 <= INT16_MAX ? 32 : 16;
}

// Adds products of pairs of 16 bits to sums.
inline int_lanes add_pairs(int_lanes sums, int_lanes a, int_lanes b) {
    return (int_lanes) DPWSSD((int_vector) sums, (int_vector) a, (int_vector) b);
}

// Each lane's sum in 32 bits, times a scale of at most 15 bits.
inline int_lanes scaled(int_lanes sums, int_lanes scale) {
    return HAS_VNNI ? sums * scale : add_pairs(int_lanes{}, sums, scale | scale << 16);
}

// Scales of a group for sums of 16 bits, by add_pairs().
inline __m256i scales_of_pairs(__m128i scales) {
    const __m256i one = _mm256_cvtepu8_epi32(scales);
    return HAS_VNNI ? one : _mm256_or_si256(one, _mm256_slli_epi32(one, 16));
}

inline float_lanes multiply_add(int_lanes sum, float_lanes scale, float_lanes acc) {
    return (float_lanes) LANES_INTRINSIC(fmadd_ps)(LANES_INTRINSIC(cvtepi32_ps)((int_vector) sum), scale, acc);
}

inline int_lanes four_values(const int8_t * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return int_lanes{} + x;
}

// One group's lanes of a vector.
inline __m256i & ints(int_lanes & lanes, int group) {
    return ((__m256i *) &lanes)[group];
}

inline __m256 & floats(float_lanes & lanes, int group) {
    return ((__m256 *) &lanes)[group];
}

// The half floats of a group in the order of lanes: rows 0, 4, 1, 5, 2, 6, 3, 7.
inline __m256 load_rearranged(const ggml_half * d) {
    const __m128i order = _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) d), order));
}

// Unsigned values of 32 columns: u[j] has columns 4j to 4j + 3.
struct columns {
    int_lanes u[8];
};

constexpr int SWAP_PAIRS = 0xb1; // in _mm256_shuffle_epi32
constexpr int ODD_LANES  = 0xaa;

// Puts eight columns of rows 0 to 3 and of rows 4 to 7 into two vectors.
inline void put(columns & to, int j, int group, __m256i rows_0123, __m256i rows_4567) {
    ints(to.u[j], group)     = _mm256_blend_epi32(rows_0123, _mm256_shuffle_epi32(rows_4567, SWAP_PAIRS), ODD_LANES);
    ints(to.u[j + 1], group) = _mm256_blend_epi32(_mm256_shuffle_epi32(rows_0123, SWAP_PAIRS), rows_4567, ODD_LANES);
}

// Rows of activations, stored each by itself or four of them in turn, eight values each.
template <typename row_block>
constexpr int STEP = std::is_same_v<row_block, block_q8_Kx4> || std::is_same_v<row_block, block_q8_0x4> ? 32 : 8;

struct activations {
    const int8_t * values[GGML_REPACKED_ROWS];              // a row's first eight; the next eight are STEP bytes later
    size_t         block_size;                              // in bytes
    float          d[GGML_MOST_BLOCKS][GGML_REPACKED_ROWS]; // scales of blocks
    int32_t        sums[GGML_MOST_BLOCKS][GGML_REPACKED_ROWS]; // see prepare
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
void prepare_row(activations & y, int row, const row_block * a, int n_blocks) {
    y.values[row] = (const int8_t *) a + offsetof(row_block, qs) + (STEP<row_block> == 8 ? 0 : row % 4 * 8);
    y.block_size  = sizeof(row_block);
    for (int b = 0; b < n_blocks; b++) {
        y.d[b][row] = scale(a[b], row % 4);
    }
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
    float_lanes sum[GGML_REPACKED_ROWS];
    float_lanes min[GGML_REPACKED_ROWS]; // to be subtracted; lanes in the order of rows
};

// ---- K-quants: blocks of 256 values, whose sub-blocks have scales and mins

template <int n_scales>
struct weights_K {
    columns     sub[8];
    int_lanes   scales[n_scales];
    int_lanes   mins[n_scales / 2]; // pairs of sub-blocks, 16 bits each; lanes in the order of rows
    float_lanes d, dmin;
};
using weights_q4_K = weights_K<8>;
using weights_q2_K = weights_K<16>;

// Adds what a part of a block has, which is 0 then.
template <typename weights>
inline void add_scaled(accumulators & acc, int row, const weights & w, float d, int_lanes & sums, int_lanes & mins) {
    acc.sum[row] = multiply_add(sums, w.d * d, acc.sum[row]);
    acc.min[row] = multiply_add(mins, w.dmin * d, acc.min[row]);
    sums = mins = int_lanes{};
}

inline void unpack(weights_q4_K & w, int group, const block_q4_Kx8 & b) {
    const __m256i low   = _mm256_set1_epi8(15);
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) {
            const __m256i rows_0123 = _mm256_loadu_si256((const __m256i *) (b.qs + 256 * i + 64 * j));
            const __m256i rows_4567 = _mm256_loadu_si256((const __m256i *) (b.qs + 256 * i + 64 * j + 32));
            put(w.sub[2 * i], 2 * j, group, _mm256_and_si256(rows_0123, low), _mm256_and_si256(rows_4567, low));
            put(w.sub[2 * i + 1], 2 * j, group, _mm256_and_si256(_mm256_srli_epi16(rows_0123, 4), low),
                _mm256_and_si256(_mm256_srli_epi16(rows_4567, 4), low));
        }
        const __m128i first              = scales_and_mins(b.scales + 24 * i);
        const __m128i second             = scales_and_mins(b.scales + 24 * i + 12);
        ints(w.scales[2 * i], group)     = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(first, order));
        ints(w.scales[2 * i + 1], group) = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(second, order));
        ints(w.mins[i], group)           = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(first, second));
    }
    floats(w.d, group)    = load_rearranged(b.d);
    floats(w.dmin, group) = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) b.dmin));
}

// A product is added up by blocks, as ggml's kernels do; by quarters of blocks where rows are stored by fours.
template <int T, typename row_block>
inline void multiply_block(const weights_q4_K & w, const activations & y, int b, accumulators & acc, int first) {
    int_lanes sums[T] = {}, mins[T] = {};
    for (int i = 0; i < 8; i++) {
        const int8_t * a[T];
        int_lanes      part[T] = {};
        for (int t = 0; t < T; t++) {
            a[t] = y.values[first + t] + b * y.block_size + 4 * STEP<row_block> * i;
        }
        static_assert(columns_of_sum(15) == 32, "a sub-block needs one sum");
        multiply_columns<32, T, STEP<row_block>>(w.sub[i], 0, a, part);
        for (int t = 0; t < T; t++) {
            sums[t] += scaled(part[t], w.scales[i]);
        }
        for (int t = 0; i % 2 == 1 && t < T; t++) {
            mins[t] = add_pairs(mins[t], int_lanes{} + y.sums[4 * b + i / 2][first + t], w.mins[i / 2]);
            if (STEP<row_block> == 32 || i == 7) {
                add_scaled(acc, first + t, w, y.d[b][first + t], sums[t], mins[t]);
            }
        }
    }
}

// Four sums of 16 values each.
inline const int16_t * sums_of_quarter(const block_q8_K & a, int i, int) {
    return a.bsums + 4 * i;
}
inline const int16_t * sums_of_quarter(const block_q8_Kx4 & a, int i, int row) {
    return a.bsums + 16 * i + 4 * row;
}

// Sums are those of two sub-blocks, 16 bits each. The first argument is there for its type.
template <typename row_block>
void prepare(const weights_q4_K &, activations & y, int row, const row_block * a, int n_blocks) {
    prepare_row(y, row, a, n_blocks);
    for (int i = 0; i < 4 * n_blocks; i++) {
        const int16_t * of16 = sums_of_quarter(a[i / 4], i % 4, row % 4);
        y.sums[i][row]       = uint16_t(of16[0] + of16[1]) | uint32_t(of16[2] + of16[3]) << 16;
    }
}

inline void unpack(weights_q2_K & w, int group, const block_q2_Kx8 & b) {
    const __m256i low    = _mm256_set1_epi8(3);
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i order  = _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 8; i++) { // two sub-blocks of 16 columns; four such pairs share bytes
        for (int j = 0; j < 4; j++) {
            const auto part = [&](const uint8_t * qs) {
                return _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *) qs), 2 * (i % 4)), low);
            };
            const uint8_t * qs = b.qs + 256 * (i / 4) + 64 * j;
            put(w.sub[i], 2 * j, group, part(qs), part(qs + 32));
        }
        const __m128i packed             = _mm_loadu_si128((const __m128i *) (b.scales + 16 * i));
        const __m128i scales             = _mm_shuffle_epi8(_mm_and_si128(packed, nibble), order);
        ints(w.scales[2 * i], group)     = scales_of_pairs(scales);
        ints(w.scales[2 * i + 1], group) = scales_of_pairs(_mm_srli_si128(scales, 8));
        ints(w.mins[i], group)           = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(packed, 4), nibble));
    }
    floats(w.d, group)    = load_rearranged(b.d);
    floats(w.dmin, group) = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) b.dmin));
}

// As above, by halves of blocks where rows are stored by fours.
template <int T, typename row_block>
inline void multiply_block(const weights_q2_K & w, const activations & y, int b, accumulators & acc, int first) {
    int_lanes sums[T] = {}, mins[T] = {};
    for (int i = 0; i < 8; i++) {
        const int8_t * a[T];
        for (int t = 0; t < T; t++) {
            a[t]    = y.values[first + t] + b * y.block_size + 4 * STEP<row_block> * i;
            mins[t] = add_pairs(mins[t], int_lanes{} + y.sums[8 * b + i][first + t], w.mins[i]);
        }
        for (int j = 0; j < 2; j++) {
            int_lanes part[T] = {}; // sums fit 16 bits with VNNI, too
            multiply_columns<16, T, STEP<row_block>>(w.sub[i], 16 * j, a, part);
            for (int t = 0; t < T; t++) {
                sums[t] = add_pairs(sums[t], part[t], w.scales[2 * i + j]);
            }
        }
        for (int t = 0; (i == 7 || (STEP<row_block> == 32 && i == 3)) && t < T; t++) {
            add_scaled(acc, first + t, w, y.d[b][first + t], sums[t], mins[t]);
        }
    }
}

template <typename row_block>
void prepare(const weights_q2_K &, activations & y, int row, const row_block * a, int n_blocks) {
    prepare_row(y, row, a, n_blocks);
    for (int i = 0; i < 8 * n_blocks; i++) {
        const int16_t * of16 = sums_of_quarter(a[i / 8], i % 8 / 2, row % 4) + i % 2 * 2;
        y.sums[i][row]       = uint16_t(of16[0]) | uint32_t(uint16_t(of16[1])) << 16;
    }
}

// ---- types of 32 values with one scale

// `offset` is added to each value, so that it lies between 0 and `most`.
template <int offset, int most>
struct weights_32 {
    columns     all;
    float_lanes d;
};
using weights_q4_0   = weights_32<8, 15>;
using weights_mxfp4  = weights_32<12, 24>;
using weights_iq4_nl = weights_32<127, 240>;

template <int offset, int most>
inline void unpack(weights_32<offset, most> & w, int group, const void * qs, __m128i values, __m256 d) {
    const __m256i low             = _mm256_set1_epi8(15);
    const __m256i unsigned_values = _mm256_broadcastsi128_si256(_mm_add_epi8(values, _mm_set1_epi8(int8_t(offset))));
    const auto    value           = [&](__m256i nibbles) {
        return _mm256_shuffle_epi8(unsigned_values, _mm256_and_si256(nibbles, low));
    };
    for (int j = 0; j < 2; j++) {
        const __m256i rows_0123 = _mm256_loadu_si256((const __m256i *) qs + 2 * j);
        const __m256i rows_4567 = _mm256_loadu_si256((const __m256i *) qs + 2 * j + 1);
        put(w.all, 2 * j, group, value(rows_0123), value(rows_4567));
        put(w.all, 2 * j + 4, group, value(_mm256_srli_epi16(rows_0123, 4)), value(_mm256_srli_epi16(rows_4567, 4)));
    }
    floats(w.d, group) = d;
}

inline void unpack(weights_q4_0 & w, int group, const block_q4_0x8 & b) {
    unpack(w, group, b.qs, _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1), load_rearranged(b.d));
}

inline void unpack(weights_iq4_nl & w, int group, const block_iq4_nlx8 & b) {
    unpack(w, group, b.qs, _mm_loadu_si128((const __m128i *) kvalues_iq4nl), load_rearranged(b.d));
}

inline void unpack(weights_mxfp4 & w, int group, const block_mxfp4x8 & b) {
    float d[8];
    for (int i = 0; i < 8; i++) {
        d[i] = GGML_CPU_E8M0_TO_FP32_HALF(b.e[i / 2 + i % 2 * 4]);
    }
    unpack(w, group, b.qs, _mm_loadu_si128((const __m128i *) kvalues_mxfp4), _mm256_loadu_ps(d));
}

template <int T, typename row_block, int offset, int most>
inline void multiply_block(const weights_32<offset, most> & w, const activations & y, int b, accumulators & acc,
                           int first) {
    const int8_t * a[T];
    int_lanes      sums[T];
    for (int t = 0; t < T; t++) {
        a[t]    = y.values[first + t] + b * y.block_size;
        sums[t] = int_lanes{} + y.sums[b][first + t];
    }
    constexpr int N = columns_of_sum(most);
    for (int i = 0; i < 32; i += N) {
        int_lanes part[T] = {};
        multiply_columns<N, T, STEP<row_block>>(w.all, i, a, part);
        for (int t = 0; t < T; t++) {
            sums[t] += scaled(part[t], int_lanes{} + 1);
        }
    }
    for (int t = 0; t < T; t++) {
        acc.sum[first + t] = multiply_add(sums[t], w.d * y.d[b][first + t], acc.sum[first + t]);
    }
}

// Sums are those of blocks, times -offset. The first argument is there for its type.
template <typename row_block, int offset, int most>
void prepare(const weights_32<offset, most> &, activations & y, int row, const row_block * a, int n_blocks) {
    prepare_row(y, row, a, n_blocks);
    const auto eight = [](const int8_t * p) { return _mm_loadl_epi64((const __m128i *) p); };
    for (int b = 0; b < n_blocks; b++) {
        const int8_t * p     = y.values[row] + b * sizeof(row_block);
        const __m128i  ones  = _mm_set1_epi8(1);
        const __m128i  first = _mm_unpacklo_epi64(eight(p), eight(p + STEP<row_block>));
        const __m128i  last  = _mm_unpacklo_epi64(eight(p + 2 * STEP<row_block>), eight(p + 3 * STEP<row_block>));
        const __m128i  pairs = _mm_add_epi16(_mm_maddubs_epi16(ones, first), _mm_maddubs_epi16(ones, last));
        const __m128i  fours = _mm_madd_epi16(pairs, _mm_set1_epi16(-offset));
        const __m128i  two   = _mm_hadd_epi32(fours, fours);
        y.sums[b][row]       = _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
    }
}

// ---- all types

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

template <typename weights, typename weight_block, typename row_block>
bool multiply_rows(int n_blocks, float * const * s, const void * vx, const void * const * vy, int nr, int nc) {
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    weights       w;
    activations   y;
    accumulators  acc;
    for (int i = 0; i < nr; i++) {
        prepare(w, y, i, (const row_block *) vy[i], n_blocks);
    }
    const int other_groups = (GROUPS - 1) * n_blocks; // blocks that are multiplied beside those of a group
    for (int x = 0; x < nc / 8; x += GROUPS) {
        const int n_groups = nc / 8 - x < GROUPS ? nc / 8 - x : GROUPS;
        memset(acc.sum, 0, sizeof(acc.sum[0]) * nr);
        memset(acc.min, 0, sizeof(acc.min[0]) * nr);
        for (int b = 0; b < n_blocks; b++) {
            for (int group = 0; group < GROUPS; group++) { // the first again in the place of one that is missing
                const weight_block * block = (const weight_block *) vx + (x + group % n_groups) * n_blocks + b;
                const int            later = AHEAD / GROUPS / sizeof(weight_block) + 1;
                const char *         next  = (const char *) (block + later + (b + later < n_blocks ? 0 : other_groups));
                for (size_t i = 0; i + 64 <= sizeof(weight_block); i += 64) {
                    fetch(next + i);
                }
                unpack(w, group, *block);
            }
            for_rows(nr, [&](auto count, int first) {
                multiply_block<decltype(count)::value, row_block>(w, y, b, acc, first);
            });
        }
        for (int i = 0; i < nr; i++) {
            for (int group = 0; group < n_groups; group++) {
                const __m256 sum = _mm256_permutevar8x32_ps(floats(acc.sum[i], group), order);
                _mm256_storeu_ps(s[i] + 8 * (x + group), _mm256_sub_ps(sum, floats(acc.min[i], group)));
            }
        }
    }
    return true;
}

template <typename block_32, typename block_K>
bool multiply(ggml_type type, int n, float * const * s, const void * vx, const void * const * vy, int nr, int nc) {
    if (n / 32 > GGML_MOST_BLOCKS) {
        return false;
    }
    switch (type) {
        case GGML_TYPE_Q4_0: return multiply_rows<weights_q4_0, block_q4_0x8, block_32>(n / QK4_0, s, vx, vy, nr, nc);
        case GGML_TYPE_MXFP4:
            return multiply_rows<weights_mxfp4, block_mxfp4x8, block_32>(n / QK_MXFP4, s, vx, vy, nr, nc);
        case GGML_TYPE_Q4_K: return multiply_rows<weights_q4_K, block_q4_Kx8, block_K>(n / QK_K, s, vx, vy, nr, nc);
        case GGML_TYPE_Q2_K: return multiply_rows<weights_q2_K, block_q2_Kx8, block_K>(n / QK_K, s, vx, vy, nr, nc);
        case GGML_TYPE_IQ4_NL: // has values that products of 16 bits do not hold
            return HAS_VNNI && multiply_rows<weights_iq4_nl, block_iq4_nlx8, block_32>(n / QK4_NL, s, vx, vy, nr, nc);
        default: return false;
    }
}

} // namespace

bool ggml_gemv_repacked_rows(enum ggml_type type, int n, float * const * s, const void * vx, const void * const * vy,
                             int nr, int nc) {
    GGML_ASSERT(nr <= GGML_REPACKED_ROWS);
    return multiply<block_q8_0, block_q8_K>(type, n, s, vx, vy, nr, nc);
}

bool ggml_gemm_repacked_rows(enum ggml_type type, int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                             int nc) {
    const bool   is_K = type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q2_K;
    const size_t four = is_K ? n / QK_K * sizeof(block_q8_Kx4) : n / QK8_0 * sizeof(block_q8_0x4);
    for (int first = 0; first < nr; first += GGML_REPACKED_ROWS) {
        const int    n_rows = nr - first < GGML_REPACKED_ROWS ? nr - first : GGML_REPACKED_ROWS;
        float *      rows_s[GGML_REPACKED_ROWS];
        const void * rows_vy[GGML_REPACKED_ROWS];
        for (int i = 0; i < n_rows; i++) {
            rows_s[i]  = s + (first + i) * bs;
            rows_vy[i] = (const char *) vy + (first + i) / 4 * four;
        }
        if (!multiply<block_q8_0x4, block_q8_Kx4>(type, n, rows_s, vx, rows_vy, n_rows, nc)) {
            return false;
        }
    }
    return true;
}

#else

bool ggml_gemv_repacked_rows(enum ggml_type, int, float * const *, const void *, const void * const *, int, int) {
    return false;
}

bool ggml_gemm_repacked_rows(enum ggml_type, int, float *, size_t, const void *, const void *, int, int) {
    return false;
}

#endif
