// SPDX-License-Identifier: MIT
#include "plain-rows.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "simd-mappings.h"

#if defined(__AVX2__) && defined(__FMA__)

// 32 products of (weight - 1) and y, added up to 8 integers. Byte b of qs holds weights 4b to 4b + 3.
static __m256i products_of_32(const uint8_t * qs, const int8_t * y) {
    const __m256i order   = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, //
                                             0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m256i bytes   = _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *) qs)),
                                                        _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    const __m256i shifts  = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
    const __m256i weights = _mm256_and_si256(_mm256_srlv_epi32(bytes, shifts), _mm256_set1_epi8(3));
    const __m256i values  = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *) y), order);
    const __m256i sums =
        _mm256_sub_epi16(_mm256_maddubs_epi16(weights, values), _mm256_maddubs_epi16(_mm256_set1_epi8(1), values));
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
}

// a * b + sum, rounded as in the generic function, where compilers fuse both, except GCC when it tunes for Zen
static float multiply_add(float a, float b, float sum) {
#if !defined(__clang__) && (defined(__tune_znver1__) || defined(__tune_znver2__) || defined(__tune_znver3__) ||        \
                            defined(__tune_znver4__) || defined(__tune_znver5__))
    float product = a * b;
    __asm__("" : "+x"(product)); // not to be fused
    return product + sum;
#else
    return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(sum)));
#endif
}

static void dot(int n, float * s, size_t, const void * vx, size_t, const void * vy, size_t, int) {
    const auto * x   = (const block_q2_0 *) vx;
    const auto * y   = (const block_q8_0 *) vy;
    float        sum = 0.0f;
    for (int i = 0; i < n / QK2_0; i++, y += 2) {
        const __m256i halves =
            _mm256_hadd_epi32(products_of_32(x[i].qs, y[0].qs), products_of_32(x[i].qs + 8, y[1].qs));
        const __m128i lanes = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        const __m128i sums  = _mm_hadd_epi32(lanes, lanes);
        const float   first = GGML_CPU_FP16_TO_FP32(y[0].d) * (float) _mm_cvtsi128_si32(sums);
        const float   both  = multiply_add(GGML_CPU_FP16_TO_FP32(y[1].d), (float) _mm_extract_epi32(sums, 1), first);
        sum                 = multiply_add(GGML_CPU_FP16_TO_FP32(x[i].d), both, sum);
    }
    *s = sum;
}

extern const plain_kernel q2_0_kernel = { GGML_TYPE_Q2_0, dot, nullptr, 1, INT64_MAX };
#endif
