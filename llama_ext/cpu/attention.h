// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

// Does what ggml_compute_forward_flash_attn_ext_f16_one_chunk of ggml's ops.cpp does, with its bits, but reads a key
// and a value once for all heads that share it. If there are parts, row 0 stands for all. False: ggml computes the
// rows.
bool ggml_cpu_attention(ggml_tensor * op, int ir0, int ir1, int64_t ic0, int64_t ic1, float * parts, int64_t stride);

// Converts the keys of positions from `first` on, at most `most`: number d of the i-th goes to to[d * stride + i].
// Returns how many it took, which ggml_compute_forward_flash_attn_ext_tiled leaves out: 0 if they are no half floats.
int ggml_cpu_transpose_keys(const ggml_tensor * k, int64_t first, int64_t head, int64_t stack, int most, float * to,
                            int64_t stride);
