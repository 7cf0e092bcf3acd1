// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

// Does what ggml_compute_forward_flash_attn_ext_f16_one_chunk of ggml's ops.cpp does, with its bits, but reads a key
// and a value once for all heads that share it. If there are parts, row 0 stands for all. False: ggml computes the
// rows.
bool ggml_cpu_attention(ggml_tensor * op, int ir0, int ir1, int64_t ic0, int64_t ic1, float * parts, int64_t stride);
