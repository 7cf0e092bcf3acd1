// SPDX-License-Identifier: MIT
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

namespace {

using weights = weights_K<block_q2_K, 16, 2>;

void unpack(weights & w, const row_lanes & rows, int64_t b, int64_t) {
    const size_t offset = b * sizeof(block_q2_K);
    int_lanes    d, packed[4]; // d and dmin, scales and mins
    gather((int32_t(*)[LANES]) & d, rows, offset + offsetof(block_q2_K, qs) + QK_K / 4, 0, 1);
    load_words(packed, rows, offset);
    w.d    = halves(d);
    w.dmin = halves(d >> 16);
    for (int i = 0; i < 8; i++) { // two sub-blocks of 16 columns
        const int_lanes two = packed[i / 2] >> i % 2 * 16;
        for (int j = 0; j < 2; j++) { // for sums of 16 bits twice
            const int_lanes one = two >> 8 * j & 15;
            w.scales[2 * i + j] = HAS_VNNI ? one : one | one << 16;
        }
        w.mins[i] = (two >> 4 & 15) | (two >> 12 & 15) << 16;
    }
}

// Four pairs of sub-blocks share bytes.
inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int part) {
    int_lanes words[8];
    load_words(words, rows, offset + offsetof(block_q2_K, qs) + 32 * part);
    load_words(words + 4, rows, offset + offsetof(block_q2_K, qs) + 32 * part + 16);
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 8; j++) {
            to[i].u[j] = words[j] >> 2 * i & 0x03030303;
        }
    }
}

// By blocks, or by halves of blocks where rows are stored by fours.
template <int T, typename row_block, typename F>
inline void multiply_block(const weights & w, const activations & y, int64_t b, accumulators & acc, int first, F sub) {
    int_lanes       sums[T] = {}, mins[T] = {};
    const columns * four = nullptr;
    for (int i = 0; i < 8; i++) {
        const int8_t * a[T];
        four = i % 4 == 0 ? sub(i / 4) : four;
        for (int t = 0; t < T; t++) {
            a[t]    = y.values[first + t] + b * y.block_size + 4 * STEP<row_block> * i;
            mins[t] = add_pairs(mins[t], int_lanes{} + y.sum_of(8 * b + i, first + t), w.mins[i]);
        }
        for (int j = 0; j < 2; j++) {
            int_lanes part[T] = {}; // sums fit 16 bits with VNNI, too
            multiply_columns<16, T, STEP<row_block>>(four[i % 4], 16 * j, a, part);
            for (int t = 0; t < T; t++) {
                sums[t] = add_pairs(sums[t], part[t], w.scales[2 * i + j]);
            }
        }
        for (int t = 0; (i == 7 || (STEP<row_block> == 32 && i == 3)) && t < T; t++) {
            add_scaled(acc, first + t, w, y.d_of(b, first + t), sums[t], mins[t]);
        }
    }
}

// Sums are those of two sub-blocks, 16 bits each. The first argument is there for its type.
template <typename row_block>
void prepare(const weights &, activations & y, int row, const row_block * a, int64_t n_blocks) {
    prepare_row(y, row, a, n_blocks);
    for (int64_t i = 0; i < 8 * n_blocks; i++) {
        const int16_t * of16 = sums_of_quarter(a[i / 8], int(i % 8 / 2), row % 4) + i % 2 * 2;
        y.sum_of(i, row)     = pair_of(of16[0], of16[1]);
    }
}

} // namespace

extern const plain_kernel q2_k_kernel = repacked_kernel<weights>(GGML_TYPE_Q2_K);
#endif
