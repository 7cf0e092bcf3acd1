// SPDX-License-Identifier: MIT
#include "row-lanes.h"

// without VNNI, products have 16 bits, which do not hold its values
#if defined(HAS_ROW_LANES) && HAS_VNNI

namespace {

using weights = weights_32<block_iq4_nl, 127, 240>;

inline void unpack(weights & w, const row_lanes & rows, int64_t b, int64_t n_blocks) {
    w.d = halves(scales_of(w, rows, b, n_blocks));
}

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int) {
    const __m128i values = _mm_add_epi8(_mm_loadu_si128((const __m128i *) kvalues_iq4nl), _mm_set1_epi8(127));
    unpack_nibbles(*to, rows, offset + offsetof(block_iq4_nl, qs),
                   [&](int_lanes nibbles) { return look_up(values, nibbles); });
}

} // namespace

extern const plain_kernel iq4_nl_kernel = repacked_32<weights>(GGML_TYPE_IQ4_NL);

#else
extern const plain_kernel iq4_nl_kernel = { GGML_TYPE_IQ4_NL, nullptr, nullptr, 0, 0, nullptr, nullptr };
#endif
