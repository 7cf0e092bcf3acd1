// SPDX-License-Identifier: MIT
#include "repacked-x86.h"

#ifdef GGML_HAS_REPACKED_ROWS

namespace {

// A vector has eight columns of eight or four rows of weights, a row in each lane of 64 bits. PARTS make eight rows.
// dot() adds the products of unsigned and signed bytes, and add_scaled() those of such sums, of at most 16 bits each,
// and of scales_of_rows().
#if defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define HAS_VNNI true
using int_vector    = __m512i;
constexpr int PARTS = 1;

inline int_vector zero() {
    return _mm512_setzero_si512();
}
inline int_vector load(const void * p) {
    return _mm512_loadu_si512(p);
}
inline int_vector every_byte(int8_t x) {
    return _mm512_set1_epi8(x);
}
inline int_vector every_lane(int64_t x) {
    return _mm512_set1_epi64(x);
}
inline int_vector shift_right(int_vector x, int n) {
    return _mm512_srli_epi16(x, n);
}
inline int_vector look_up(__m128i table, int_vector i) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), i);
}
inline int_vector dot(int_vector sums, int_vector u, int_vector a) {
    return _mm512_dpbusd_epi32(sums, u, a);
}
inline int_vector add_scaled(int_vector acc, int_vector sums, int_vector scale) {
    return _mm512_dpwssd_epi32(acc, sums, scale);
}
inline int_vector scales_of_rows(__m128i pairs, int) {
    return _mm512_cvtepu8_epi32(pairs);
}
inline __m256i sums_of_rows(const int_vector * x) {
    return _mm256_hadd_epi32(_mm512_castsi512_si256(x[0]), _mm512_extracti64x4_epi64(x[0], 1));
}
#else
using int_vector    = __m256i;
constexpr int PARTS = 2;

inline int_vector zero() {
    return _mm256_setzero_si256();
}
inline int_vector load(const void * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}
inline int_vector every_byte(int8_t x) {
    return _mm256_set1_epi8(x);
}
inline int_vector every_lane(int64_t x) {
    return _mm256_set1_epi64x(x);
}
inline int_vector shift_right(int_vector x, int n) {
    return _mm256_srli_epi16(x, n);
}
inline int_vector look_up(__m128i table, int_vector i) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), i);
}
inline __m256i sums_of_rows(const int_vector * x) {
    return _mm256_hadd_epi32(x[0], x[1]);
}
#if defined(__AVXVNNI__)
#define HAS_VNNI true
inline int_vector dot(int_vector sums, int_vector u, int_vector a) {
    return _mm256_dpbusd_avx_epi32(sums, u, a);
}
inline int_vector add_scaled(int_vector acc, int_vector sums, int_vector scale) {
    return _mm256_dpwssd_avx_epi32(acc, sums, scale);
}
inline int_vector scales_of_rows(__m128i pairs, int part) {
    return _mm256_cvtepu8_epi32(part == 0 ? pairs : _mm_srli_si128(pairs, 8));
}
#else
#define HAS_VNNI false
// Sums have 16 bits. They take four calls of dot(), so eight products of at most 24 * 127.
inline int_vector dot(int_vector sums, int_vector u, int_vector a) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(u, a));
}
inline int_vector add_scaled(int_vector acc, int_vector sums, int_vector scale) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(sums, scale));
}
inline int_vector scales_of_rows(__m128i pairs, int part) {
    return _mm256_cvtepu8_epi16(part == 0 ? _mm_unpacklo_epi8(pairs, pairs) : _mm_unpackhi_epi8(pairs, pairs));
}
#endif
#endif

// Sums of bytes' products, with 32 bits.
inline int_vector wide(int_vector sums) {
    return HAS_VNNI ? sums : add_scaled(zero(), sums, every_lane(0x0001000100010001));
}

// Eight columns of activations, for each row of weights.
inline int_vector eight_columns(const int8_t * a) {
    int64_t x;
    memcpy(&x, a, sizeof(x));
    return every_lane(x);
}

// Each of eight bytes twice, as scales_of_rows() takes them.
inline __m128i twice(__m128i eight) {
    return _mm_unpacklo_epi8(eight, eight);
}

// Puts rows of weights into the order of sums_of_rows(), or back.
inline __m256 in_order(__m256 x) {
    return _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
}

inline __m256 multiply_add(__m256i sum, __m256 scale, float d, __m256 acc) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_set1_ps(d)), acc);
}

inline __m256 halves(const ggml_half * d) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) d));
}

// ---- types of 32 values with one scale

struct type_q4_0 {
    using block                 = block_q4_0x8;
    static constexpr int OFFSET = 8; // is added to each value, so that none is negative

    static int_vector values(int_vector nibbles) { return nibbles ^ every_byte(8); }
    static __m256     scales(const block & b) { return in_order(halves(b.d)); }
};

// The value of each nibble in a table.
inline int_vector values_in(const int8_t * table, int offset, int_vector nibbles) {
    const __m128i values = _mm_loadu_si128((const __m128i *) table);
    return look_up(_mm_add_epi8(values, _mm_set1_epi8(int8_t(offset))), nibbles);
}

struct type_iq4_nl {
    using block                 = block_iq4_nlx8;
    static constexpr int OFFSET = 127;

    static int_vector values(int_vector nibbles) { return values_in(kvalues_iq4nl, OFFSET, nibbles); }
    static __m256     scales(const block & b) { return in_order(halves(b.d)); }
};

struct type_mxfp4 {
    using block                 = block_mxfp4x8;
    static constexpr int OFFSET = 12;

    static int_vector values(int_vector nibbles) { return values_in(kvalues_mxfp4, OFFSET, nibbles); }
    static __m256     scales(const block & b) { // as GGML_CPU_E8M0_TO_FP32_HALF
        const __m256i e      = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) b.e));
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i small  = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        const __m256i which  = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
        return in_order(_mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, which)));
    }
};

inline int32_t sum_of_32(const int8_t * a) {
    const __m256i values = _mm256_loadu_si256((const __m256i *) a);
    const __m256i pairs  = _mm256_maddubs_epi16(_mm256_set1_epi8(1), values);
    const __m256i fours  = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    const __m128i four   = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    const __m128i two    = _mm_hadd_epi32(four, four);
    return _mm_cvtsi128_si32(_mm_hadd_epi32(two, two));
}

template <typename type>
void multiply_32(int n_blocks, float * s, const void * vx, const void * vy, int nc) {
    const auto * w   = (const typename type::block *) vx;
    const auto * a   = (const block_q8_0 *) vy;
    const auto   low = every_byte(15);
    int32_t      start[GGML_MOST_BLOCKS];
    float        d[GGML_MOST_BLOCKS];
    for (int b = 0; b < n_blocks; b++) {
        start[b] = -type::OFFSET * sum_of_32(a[b].qs);
        d[b]     = GGML_CPU_FP16_TO_FP32(a[b].d);
    }
    for (int x = 0; x < nc; x += 8) {
        __m256 acc = _mm256_setzero_ps();
        for (int b = 0; b < n_blocks; b++, w++) {
            fetch((const char *) w->qs + AHEAD);
            fetch((const char *) w->qs + 64 + AHEAD);
            int_vector sums[PARTS];
            for (int part = 0; part < PARTS; part++) {
                const int_vector first = load(w->qs + 32 * part);
                const int_vector last  = load(w->qs + 64 + 32 * part);
                int_vector       sum   = dot(zero(), type::values(first & low), eight_columns(a[b].qs));
                sum                    = dot(sum, type::values(last & low), eight_columns(a[b].qs + 8));
                sum        = dot(sum, type::values(shift_right(first, 4) & low), eight_columns(a[b].qs + 16));
                sum        = dot(sum, type::values(shift_right(last, 4) & low), eight_columns(a[b].qs + 24));
                sums[part] = wide(sum);
            }
            const __m256i sum = _mm256_add_epi32(sums_of_rows(sums), _mm256_set1_epi32(start[b]));
            acc               = multiply_add(sum, type::scales(*w), d[b], acc);
        }
        _mm256_storeu_ps(s + x, in_order(acc));
    }
}

// ---- K-quants: blocks of 256 values, whose sub-blocks have scales and mins

// A product of a block: with scales, and of mins, whose lanes are in the order of rows.
struct sums_K {
    int_vector scaled[PARTS];
    __m256i    mins;
};

// Adds mins of two sub-blocks of each row, 16 bits each, times the sums of the activations there.
inline void add_mins(sums_K & sums, __m128i mins, int first, int second) {
    const __m256i of_a = _mm256_set1_epi32(int(uint16_t(first) | uint32_t(second) << 16));
    sums.mins          = _mm256_add_epi32(sums.mins, _mm256_madd_epi16(_mm256_cvtepu8_epi16(mins), of_a));
}

inline void add_block(sums_K & sums, const block_q4_Kx8 & w, const block_q8_K & a) {
    const auto low = every_byte(15);
    for (int i = 0; i < 4; i++) { // two sub-blocks of 32 columns
        const __m128i   first  = scales_and_mins(w.scales + 24 * i);
        const __m128i   second = scales_and_mins(w.scales + 24 * i + 12);
        const int16_t * of_16  = a.bsums + 4 * i;
        add_mins(sums, _mm_unpackhi_epi8(first, second), of_16[0] + of_16[1], of_16[2] + of_16[3]);
        for (int part = 0; part < PARTS; part++) {
            int_vector sum_1 = zero(), sum_2 = zero();
            for (int j = 0; j < 32; j += 8) {
                const uint8_t *  qs = w.qs + 256 * i + 8 * j + 32 * part;
                const int_vector q  = load(qs);
                fetch((const char *) qs + AHEAD);
                sum_1 = dot(sum_1, q & low, eight_columns(a.qs + 64 * i + j));
                sum_2 = dot(sum_2, shift_right(q, 4) & low, eight_columns(a.qs + 64 * i + 32 + j));
            }
            sums.scaled[part] = add_scaled(sums.scaled[part], sum_1, scales_of_rows(twice(first), part));
            sums.scaled[part] = add_scaled(sums.scaled[part], sum_2, scales_of_rows(twice(second), part));
        }
    }
}

inline void add_block(sums_K & sums, const block_q2_Kx8 & w, const block_q8_K & a) {
    const auto    low  = every_byte(3);
    const __m128i even = _mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
    const __m128i odd  = _mm_add_epi8(even, _mm_set1_epi8(1));
    for (int i = 0; i < 8; i++) { // two sub-blocks of 16 columns; four such pairs share bytes
        const uint8_t * qs     = w.qs + 256 * (i / 4);
        const __m128i   packed = _mm_loadu_si128((const __m128i *) (w.scales + 16 * i));
        const __m128i   scales = _mm_and_si128(packed, _mm_set1_epi8(15));
        add_mins(sums, _mm_and_si128(_mm_srli_epi16(packed, 4), _mm_set1_epi8(15)), a.bsums[2 * i], a.bsums[2 * i + 1]);
        fetch((const char *) w.qs + 64 * i + AHEAD);
        for (int part = 0; part < PARTS; part++) {
            int_vector sum[2] = { zero(), zero() };
            for (int j = 0; j < 4; j++) {
                const int_vector u = shift_right(load(qs + 64 * j + 32 * part), 2 * (i % 4)) & low;
                sum[j / 2]         = dot(sum[j / 2], u, eight_columns(a.qs + 32 * i + 8 * j));
            }
            const __m128i first = _mm_shuffle_epi8(scales, even), second = _mm_shuffle_epi8(scales, odd);
            sums.scaled[part] = add_scaled(sums.scaled[part], sum[0], scales_of_rows(first, part));
            sums.scaled[part] = add_scaled(sums.scaled[part], sum[1], scales_of_rows(second, part));
        }
    }
}

template <typename block>
void multiply_K(int n_blocks, float * s, const void * vx, const void * vy, int nc) {
    const auto * w = (const block *) vx;
    const auto * a = (const block_q8_K *) vy;
    for (int x = 0; x < nc; x += 8) {
        __m256 acc = _mm256_setzero_ps(), acc_min = acc;
        for (int b = 0; b < n_blocks; b++, w++) {
            sums_K sums = {};
            add_block(sums, *w, a[b]);
            acc     = multiply_add(sums_of_rows(sums.scaled), in_order(halves(w->d)), a[b].d, acc);
            acc_min = multiply_add(sums.mins, halves(w->dmin), a[b].d, acc_min);
        }
        _mm256_storeu_ps(s + x, _mm256_sub_ps(in_order(acc), acc_min));
    }
}

} // namespace

bool ggml_gemv_repacked_row(enum ggml_type type, int n, float * s, const void * vx, const void * vy, int nc) {
    if (n / 32 > GGML_MOST_BLOCKS) {
        return false;
    }
    switch (type) {
        case GGML_TYPE_Q4_0:  multiply_32<type_q4_0>(n / 32, s, vx, vy, nc); return true;
        case GGML_TYPE_MXFP4: multiply_32<type_mxfp4>(n / 32, s, vx, vy, nc); return true;
        case GGML_TYPE_Q4_K:  multiply_K<block_q4_Kx8>(n / QK_K, s, vx, vy, nc); return true;
        case GGML_TYPE_Q2_K:  multiply_K<block_q2_Kx8>(n / QK_K, s, vx, vy, nc); return true;
        case GGML_TYPE_IQ4_NL: // has values that products of 16 bits do not hold
            return HAS_VNNI && (multiply_32<type_iq4_nl>(n / 32, s, vx, vy, nc), true);
        default: return false;
    }
}

#else

bool ggml_gemv_repacked_row(enum ggml_type, int, float *, const void *, const void *, int) {
    return false;
}

#endif
