// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "model/expert-index.h"

#include <cstddef>
#include <cstdint>

namespace hobbit {

// A device may multiply weights faster in a layout of its own ("repacked" weights: ggml's extra buffer types). Such a
// layout takes the bytes that the file's takes and keeps row groups in their order, so a matrix is converted in pieces.
//
// Thread-safety: all functions may be called from any thread.

// The buffer type in whose layout llama.cpp would keep experts of this type and shape on `device`; null: as in the
// file.
ggml_backend_buffer_type_t packed_layout(ggml_backend_dev_t device, ggml_type type, const matrix_shape & shape,
                                         uint32_t n_experts);

// Whether the device multiplies by `n_experts` matrices of this type and shape at once, `stride` bytes apart.
bool multiplies_experts(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, ggml_type type,
                        const matrix_shape & shape, size_t stride, int64_t n_experts);

// Makes a tensor of weights known to the buffer that holds it.
void init_weights(ggml_backend_buffer_t buffer, ggml_tensor * tensor);

// Rows that are converted at once, in about `n_bytes`: whole row groups of every layout.
int64_t rows_per_chunk(size_t n_bytes, size_t row_size);

// Writes rows as the file has them to `dst`, which lies in `buffer`, in the layout of the buffer's type. With a backend
// of the buffer's device it only begins to: they are there when that is synchronized.
void set_rows(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
              ggml_backend_t stream = nullptr);

// Writes so many zeros to `dst`, which lies in `buffer`, of a device with memory of its own.
void set_zeros(ggml_backend_buffer_t buffer, char * dst, size_t size);

} // namespace hobbit
