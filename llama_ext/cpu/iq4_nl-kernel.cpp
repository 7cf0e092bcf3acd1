// SPDX-License-Identifier: MIT
#include "row-lanes.h"

// without VNNI, products have 16 bits, which do not hold its values
#if defined(HAS_ROW_LANES) && HAS_VNNI

namespace {

using weights = weights_32<block_iq4_nl, 127, 240>;

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int) {
    unpack_by_table<weights>(*to, rows, offset + offsetof(block_iq4_nl, qs), kvalues_iq4nl);
}

} // namespace

extern const plain_kernel iq4_nl_kernel = repacked_kernel<weights>(GGML_TYPE_IQ4_NL);
#endif
