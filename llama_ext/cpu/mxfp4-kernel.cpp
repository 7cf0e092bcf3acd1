// SPDX-License-Identifier: MIT
#include "row-lanes.h"

#ifdef HAS_ROW_LANES

namespace {

using weights = weights_32<block_mxfp4, 12, 24>;

inline void unpack(weights & w, const row_lanes & rows, int64_t b, int64_t n_blocks) {
    const int_lanes e = scales_of(w, rows, b, n_blocks) & 0xff; // as GGML_CPU_E8M0_TO_FP32_HALF
    w.d               = (float_lanes) (e < 2 ? 0x00200000 << e : (e - 1) << 23);
}

inline void unpack_part(columns * to, const row_lanes & rows, size_t offset, int) {
    unpack_by_table<weights>(*to, rows, offset + offsetof(block_mxfp4, qs), kvalues_mxfp4);
}

} // namespace

extern const plain_kernel mxfp4_kernel = repacked_kernel<weights>(GGML_TYPE_MXFP4);
#endif
