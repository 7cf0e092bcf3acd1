// SPDX-License-Identifier: MIT
#pragma once

// Parts that the products of one row and of several rows have in common; for their sources alone.

#include "repacked-rows.h"

#define GGML_COMMON_IMPL_CPP
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "repack.h"
#include "simd-mappings.h"

#include <cstdint>
#include <cstring>

// The most blocks of 32 values in a row.
constexpr int GGML_MOST_BLOCKS = 256;

#if defined(__GNUC__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GGML_HAS_REPACKED_ROWS

// Bytes between what is multiplied and what is fetched. Processors do not read far enough ahead by themselves: on a
// Xeon, weights in memory are multiplied up to twice as fast with 8 KiB as without.
constexpr int AHEAD = 8192;

// Fetches a line into the second cache; any address may be given.
static inline void fetch(const char * p) {
    __builtin_prefetch(p, 0, 2);
}

// Eight scales and eight mins of a sub-block of block_q4_Kx8.
static inline __m128i scales_and_mins(const uint8_t * packed) {
    uint32_t x[4];
    memcpy(x, packed, 12);
    x[3]                 = ((x[2] >> 4) & 0x0f0f0f0f) | (((x[1] >> 6) & 0x03030303) << 4);
    const uint32_t mins  = x[1] & 0x3f3f3f3f;
    x[1]                 = (x[2] & 0x0f0f0f0f) | (((x[0] >> 6) & 0x03030303) << 4);
    x[2]                 = mins;
    x[0]                &= 0x3f3f3f3f;
    return _mm_loadu_si128((const __m128i *) x);
}
#endif
