// SPDX-License-Identifier: MIT
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

namespace {

using weights = weights_32<block_q4_0, 8, 15>;

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int) {
    unpack_nibbles(*to, rows, offset + offsetof(block_q4_0, qs), [](int_lanes nibbles) { return nibbles; });
}

} // namespace

extern const plain_kernel q4_0_kernel = repacked_kernel<weights>(GGML_TYPE_Q4_0);
#endif
