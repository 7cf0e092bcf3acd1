// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

// Products of a matrix of weights, repacked in groups of eight rows, and several rows of activations. The weights are
// unpacked once for all of them, or for GGML_REPACKED_ROWS at a time. Each product is added up in the order of ggml's
// kernel, so it has the same bits if the activations are finite. n is the number of values of a row, nc that of rows of
// weights. A function returns false, and does nothing, if it has no kernel for the type, the size or the processor.
//
// Thread-safety: may be called from any thread.

constexpr int GGML_REPACKED_ROWS = 32;

// ggml_gemv_* for each row: s[i] gets the products of the row vy[i], quantized by itself.
// REQUIRES: nr is at most GGML_REPACKED_ROWS
bool ggml_gemv_repacked_rows(enum ggml_type type, int n, float * const * s, const void * vx, const void * const * vy,
                             int nr, int nc);

// ggml_gemv_repacked_rows for one row.
bool ggml_gemv_repacked_row(enum ggml_type type, int n, float * s, const void * vx, const void * vy, int nc);

// ggml_gemm_* for rows quantized by fours.
bool ggml_gemm_repacked_rows(enum ggml_type type, int n, float * s, size_t bs, const void * vx, const void * vy, int nr,
                             int nc);
