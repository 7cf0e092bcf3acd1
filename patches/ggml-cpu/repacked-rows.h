// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"

// Products of a matrix of weights, repacked in groups of eight rows, and several rows of activations. The weights are
// unpacked once for all of them. Each product is added up in the order of ggml_gemv_*, so it has the same bits.
//
// s[i] gets the nc products of row i, whose quantized activations are vy[i]; n is the number of values of a row.
// Returns false, and does nothing, if the type or the processor has no such function.
//
// Thread-safety: may be called from any thread.
bool ggml_gemv_repacked_rows(enum ggml_type type, int n, float * const * s, const void * vx, const void * const * vy,
                             int nr, int nc);

// The most rows of a call.
constexpr int GGML_REPACKED_ROWS = 32;
