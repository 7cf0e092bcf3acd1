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

} // namespace

extern const plain_kernel q4_k_kernel = repacked_kernel<weights>(GGML_TYPE_Q4_K);

#else
extern const plain_kernel q4_k_kernel = { GGML_TYPE_Q4_K, nullptr, nullptr, 0, 0, nullptr, nullptr };
#endif
