// SPDX-License-Identifier: MIT
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

namespace {

constexpr int N_VECTORS = QK_K / sizeof(int_vector); // that hold a block's values

// Each lane of 16 bits finds its pair's scale among sixteen bytes.
struct places_of_scales {
    alignas(64) int16_t at[QK_K / 2] = {};

    constexpr places_of_scales() {
        for (int i = 0; i < QK_K / 2; i++) {
            at[i] = int16_t(i / 8 << 8 | 0x80); // the low byte is zero
        }
    }
};

// Some rows of activations: a block of weights, unpacked for all of them. Bits are those of ggml's product of one row.
struct block {
    int_vector values[N_VECTORS]; // plus 32
    int_vector scales[N_VECTORS]; // 16 bits for each pair of values
    __m256i    offsets;           // -32 times the scale of sixteen values
    float      d;

    explicit block(const block_q6_K & from) : d(GGML_CPU_FP16_TO_FP32(from.d)) {
        static constexpr places_of_scales places;
        const __m128i                     bytes = _mm_loadu_si128((const __m128i *) from.scales);
        offsets = _mm256_mullo_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_set1_epi16(-32));
#pragma GCC unroll 8
        for (int i = 0; i < N_VECTORS; i++) {
            const int  part = i * LANES / 8 % 4; // half a block has four of 32 values; with 16 lanes the next one, too
            const int  half = i * LANES / 32;
            const auto low  = (int_lanes) load_vector(from.ql + 64 * half + part % 2 * 32) >> part / 2 * 4;
            const int_lanes high = two_bits(from.qh + 32 * half, part);
            values[i]            = (int_vector) ((low & 0x0f0f0f0f) | (high & 0x03030303) << 4);
            const auto at        = (int_lanes) load_vector(places.at + 2 * LANES * i);
            scales[i]            = LANES_INTRINSIC(srai_epi16)((int_vector) look_up(bytes, at), 8);
        }
    }

  private:
    // The high bits of a part, and of the next, in the low ones of each byte.
    static int_lanes two_bits(const uint8_t * p, int part) {
        const __m256i bytes = _mm256_loadu_si256((const __m256i *) p);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
        const __m512i next = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(2), 1);
        return (int_lanes) _mm512_broadcast_i64x4(bytes) >> (int_lanes) next >> 2 * part;
#else
        return (int_lanes) bytes >> 2 * part;
#endif
    }
};

inline __m256 add_product(__m256 acc, const block & w, const block_q8_K & y) {
    int_lanes sums = {};
#pragma GCC unroll 8
    for (int i = 0; i < N_VECTORS; i++) {
        const int_vector pairs =
            LANES_INTRINSIC(maddubs_epi16)(w.values[i], load_vector(y.qs + i * sizeof(int_vector)));
        sums = add_pairs(sums, (int_lanes) pairs, (int_lanes) w.scales[i]);
    }
    const __m256i offsets = _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *) y.bsums), w.offsets);
    const __m256  all     = _mm256_cvtepi32_ps(_mm256_add_epi32(eight_lanes(sums), offsets));
    return _mm256_fmadd_ps(_mm256_set1_ps(y.d * w.d), all, acc);
}

inline float add_lanes(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// A plain_multiply: a block is unpacked once for all rows of activations.
void multiply_by_rows(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                      int64_t nc) {
    for (int64_t x = 0; x < nc; x++, vx += bx) {
        __m256 acc[PLAIN_ROWS];
        std::fill_n(acc, nr, _mm256_setzero_ps());
        for (int64_t b = 0; b < n / QK_K; b++) {
            const block w(((const block_q6_K *) vx)[b]);
            for (int i = 0; i < nr; i++) {
                acc[i] = add_product(acc[i], w, ((const block_q8_K *) vy[i])[b]);
            }
        }
        for (int i = 0; i < nr; i++) {
            s[i][x] = add_lanes(acc[i]);
        }
    }
}

//
// many rows of activations: a row of weights in each lane, with the bits of ggml's tiled products
//

struct weights {
    using block                  = block_q6_K;
    static constexpr int BLOCK   = QK_K;
    static constexpr int N_PARTS = 2, N_SUB = 4; // halves of a block are unpacked at once
    int_lanes            scales[16];
    int_lanes            offsets[8]; // -32 times two scales, 16 bits each
    float_lanes          d;
};

void unpack(weights & w, const row_lanes & rows, int64_t b, int64_t) {
    uint16_t d[1][LANES];
    gather(d, rows, b * sizeof(block_q6_K) + offsetof(block_q6_K, d), 0, 1);
    w.d = halves(load_lanes(d[0]));
    int_lanes words[4]; // the scales
    load_words(words, rows, b * sizeof(block_q6_K) + offsetof(block_q6_K, scales));
    for (int i = 0; i < 16; i++) {
        w.scales[i] = words[i / 4] << (24 - i % 4 * 8) >> 24;
    }
    for (int i = 0; i < 8; i++) {
        w.offsets[i] = (w.scales[2 * i] * -32 & 0xffff) | w.scales[2 * i + 1] * -32 << 16;
    }
}

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int part) {
    int_lanes low[16], high[8];
    for (int i = 0; i < 4; i++) {
        load_words(low + 4 * i, rows, offset + offsetof(block_q6_K, ql) + 64 * part + 16 * i);
    }
    for (int i = 0; i < 2; i++) {
        load_words(high + 4 * i, rows, offset + offsetof(block_q6_K, qh) + 32 * part + 16 * i);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 8; j++) {
            to[i].u[j] = (low[8 * (i % 2) + j] >> i / 2 * 4 & 0x0f0f0f0f) | (high[j] >> 2 * i & 0x03030303) << 4;
        }
    }
}

// sub: returns the columns of a part.
template <int T, typename row_block, typename F>
inline void multiply_block(const weights & w, const activations & y, int64_t b, accumulators & acc, int first, F sub) {
    constexpr int  N       = HAS_VNNI ? 16 : 8; // columns whose products fit into a sum
    int_lanes      sums[T] = {};
    const int8_t * a[T];
    for (int t = 0; t < T; t++) {
        a[t] = y.values[first + t] + b * y.block_size;
    }
    for (int part = 0; part < weights::N_PARTS; part++) {
        const columns * some = sub(part);
        for (int i = 0; i < 4; i++) {
#pragma GCC unroll 4
            for (int column = 0; column < 32; column += N) {
                int_lanes products[T] = {};
                multiply_columns<N, T, STEP<row_block>>(some[i], column, a, products);
                for (int t = 0; t < T; t++) {
                    sums[t] += scaled(products[t], w.scales[8 * part + 2 * i + column / 16]);
                }
            }
            for (int t = 0; t < T; t++) {
                a[t] += 32;
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < T; t++) {
        for (int i = 0; i < 8; i++) {
            sums[t] = add_pairs(sums[t], int_lanes{} + y.sum_of(8 * b + i, first + t), w.offsets[i]);
        }
        const auto    product = (float_lanes) LANES_INTRINSIC(cvtepi32_ps)((int_vector) sums[t]) * w.d;
        float_lanes & sum     = acc.sum[first + t];
        sum                   = LANES_INTRINSIC(fmadd_ps)(product, float_lanes{} + y.d_of(b, first + t), sum);
    }
}

// Sums are those of two times 16 values. The first argument is there for its type.
void prepare(const weights &, activations & y, int row, const block_q8_K * a, int64_t n_blocks) {
    prepare_row(y, row, a, n_blocks);
    for (int64_t i = 0; i < 8 * n_blocks; i++) {
        const int16_t * two = a[i / 8].bsums + i % 8 * 2;
        y.sum_of(i, row)    = pair_of(two[0], two[1]);
    }
}

} // namespace

extern const plain_kernel q6_k_kernel = {
    GGML_TYPE_Q6_K,       nullptr, multiply_by_rows, 2,
    MOST_BLOCKS / 4 * 32, nullptr, nullptr,          multiply_all<weights, block_q8_K>
};
#endif
