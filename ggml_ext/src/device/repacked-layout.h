// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "model/expert.h"

#include <cstddef>
#include <cstdint>

namespace hobbit {

// A device may multiply weights faster in a layout of its own ("repacked" weights: ggml's extra buffer types). Such a
// layout has the size of the file's and keeps row groups in their order, so a matrix can be converted in pieces.
//
// Thread-safety: all functions may be called from any thread.

// Returns true if ggml may put weights into a buffer type of this name, or asks it for products.
bool has_buffer_type(ggml_backend_dev_t device, const char * name);

// The buffer type whose layout llama.cpp would choose for experts of this type and shape on `device`; null: the file's
// layout.
ggml_backend_buffer_type_t packed_layout(ggml_backend_dev_t device, ggml_type type, const matrix_shape & shape,
                                         uint32_t n_experts);

// Returns true if one operation of the device multiplies by `n_experts` matrices of this type and shape, `stride` bytes
// apart.
bool multiplies_experts(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, ggml_type type,
                        const matrix_shape & shape, size_t stride, int64_t n_experts);

// Puts a tensor of weights into the buffer that holds its data.
void init_weights(ggml_backend_buffer_t buffer, ggml_tensor * tensor);

// The number of rows to convert at once, in about `n_bytes`: whole row groups of every layout.
int64_t rows_per_chunk(size_t n_bytes, size_t row_size);

// Writes rows in the file's layout to `dst`, which lies in `buffer`, in the layout of the buffer's type. With `stream`,
// a backend of the buffer's device, the copy is asynchronous: it is complete when `stream` is synchronized.
void set_rows(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
              ggml_backend_t stream = nullptr);

// Sets `size` bytes at `dst` to zero. REQUIRES: `buffer`, which holds them, is in a device's own memory.
void set_zeros(ggml_backend_buffer_t buffer, char * dst, size_t size);

} // namespace hobbit
