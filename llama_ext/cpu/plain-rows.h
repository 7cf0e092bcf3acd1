// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpu.h"

constexpr int PLAIN_ROWS = 32; // the most rows of activations that are multiplied at once

// Products of weights of one type, as files have them. Each file NAME-kernel.cpp of this folder defines NAME_kernel,
// and the build finds it. Where the processor lacks instructions, both functions are null. A product has the bits of
// ggml's function for one row, if scales are no NaNs.
//
// Thread-safety: the functions may be called from any thread.
struct plain_kernel {
    ggml_type type;

    // Products of one row of weights and one of activations; null: ggml's own function.
    ggml_vec_dot_t dot;

    // s[i] gets the products of the row of activations vy[i] and nc rows of n weights, which begin bx bytes apart.
    // Null: each by `dot`. REQUIRES: nr is at most PLAIN_ROWS; ggml has converted vy
    void (*multiply)(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                     int64_t nc);

    int64_t least_rows; // ggml is as fast with fewer rows of activations
    int64_t most_columns;
};

// A type for no buffer: by it, ggml finds our products of weights in host memory as files have them. We multiply by one
// row of activations in all types, and by several in those that have a kernel. May be called from any thread.
ggml_backend_buffer_type_t ggml_backend_cpu_plain_rows_buffer_type();
