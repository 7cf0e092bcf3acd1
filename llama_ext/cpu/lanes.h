// SPDX-License-Identifier: MIT
#pragma once

// Vectors with a lane for each row of weights, sixteen or eight, of the processor that is compiled for; for kernels'
// sources alone. HAS_ROW_LANES: there are any.

#define GGML_COMMON_IMPL_CPP
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "simd-mappings.h"

#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAS_ROW_LANES

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANES_INTRINSIC(name) _mm512_##name
constexpr int LANES = 16;
using int_vector    = __m512i;
using half_vector   = __m256i_u;
#else
#define LANES_INTRINSIC(name) _mm256_##name
constexpr int LANES = 8;
using int_vector    = __m256i;
using half_vector   = __m128i_u;
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

#define UNPACK(part, width, a, b) LANES_INTRINSIC(unpack##part##_epi##width)((int_vector) (a), (int_vector) (b))

namespace {

typedef int32_t int_lanes __attribute__((vector_size(4 * LANES)));
typedef float   float_lanes __attribute__((vector_size(4 * LANES)));

// Adds products of unsigned bytes u and signed bytes a to sums: with VNNI four to 32 bits, else two to 16 bits.
inline int_lanes dot(int_lanes sums, int_lanes u, int_lanes a) {
    int_vector more = DPBUSD((int_vector) sums, (int_vector) u, (int_vector) a);
    asm("" : "+v"(more)); // else GCC adds in another order, which needs more registers than there are
    return (int_lanes) more;
}

inline float_lanes multiply_add(int_lanes sum, float_lanes scale, float_lanes acc) {
    return (float_lanes) LANES_INTRINSIC(fmadd_ps)(LANES_INTRINSIC(cvtepi32_ps)((int_vector) sum), scale, acc);
}

inline int_vector load_vector(const void * p) {
    int_vector x;
    memcpy(&x, p, sizeof(x));
    return x;
}

// Eight sums: lanes eight apart are added.
inline __m256i eight_lanes(int_lanes x) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m512i v = (__m512i) x;
    return _mm256_add_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
#else
    return (__m256i) x;
#endif
}

inline int_lanes four_values(const int8_t * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return int_lanes{} + x;
}

} // namespace
#endif
