// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

// Products of weights as files have them and several rows of activations. Each product is added up in the order of
// ggml's functions for one row, so it has the same bits if scales are no NaNs.
//
// Thread-safety: may be called from any thread.

#define GGML_PLAIN_ROWS 32

#ifdef __cplusplus
extern "C" {
#endif

// True if there is a kernel for the type, the processor and rows of n weights.
bool ggml_has_plain_rows(enum ggml_type type, int64_t n);

// s[i] gets the products of the row of activations vy[i] and nc rows of n weights, which begin bx bytes apart.
// REQUIRES: ggml_has_plain_rows(type, n); nr is at most GGML_PLAIN_ROWS; no value of vy is -128: ggml quantizes to none
void ggml_gemm_plain_rows(enum ggml_type type, int64_t n, float * const * s, const void * vx, size_t bx,
                          const void * const * vy, int nr, int64_t nc);

#ifdef __cplusplus
}
#endif
