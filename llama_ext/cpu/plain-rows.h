// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpu.h"

constexpr int PLAIN_ROWS = 32; // the most rows of activations that are multiplied at once
constexpr int TILED_ROWS = 8;  // from so many rows of a matrix on, ggml's product is the tiled one

// s[i] gets the products of the row of activations vy[i] and nc rows of n weights, which begin bx bytes apart.
// REQUIRES: nr is at most PLAIN_ROWS; nc is a multiple of four for `repacked` and `tiled`; ggml has converted vy
using plain_multiply = void(int64_t n, float * const * s, const char * vx, size_t bx, const void * const * vy, int nr,
                            int64_t nc);

// Products of weights of one type, as files have them. Each file NAME-kernel.cpp of this folder defines NAME_kernel
// where the processor has its instructions, and the build finds it. If scales are no NaNs, a product has the bits of
// ggml's function for one row, or of its function for repacked rows.
//
// Thread-safety: the functions may be called from any thread.
struct plain_kernel {
    ggml_type type;

    // Products of one row of weights and one of activations; null: ggml's own function.
    ggml_vec_dot_t dot;

    // Null: each by `dot`.
    plain_multiply * multiply;

    int64_t least_rows; // ggml is as fast with fewer rows of activations
    int64_t most_columns;

    // Products with the bits of repacked rows, or null. By fours, vy[i] is number i % 4 in its block of four rows.
    plain_multiply * repacked;
    plain_multiply * repacked_by_fours;

    plain_multiply * tiled = nullptr; // with the bits of ggml's tiled products, of TILED_ROWS and more
};

// By this type, ggml finds our products of weights in host memory as files have them. Elsewhere we multiply by one row
// of activations in all types, and by several in those that have a kernel. A buffer of this type holds weights that
// llama.cpp would repack: their products have the bits of repacked ones. May be called from any thread.
ggml_backend_buffer_type_t ggml_backend_cpu_plain_rows_buffer_type();
