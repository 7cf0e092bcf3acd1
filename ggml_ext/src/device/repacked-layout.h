// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "model/expert.h"

#include <cstddef>
#include <cstdint>

namespace hobbit {

// A device may multiply weights faster in a buffer type of its own (ggml's extra buffer types). Its layout is the
// file's in host memory, and else another one ("repacked" weights), which has the size of the file's and keeps row
// groups in their order, so that a matrix can be converted in pieces.
//
// Thread-safety: all functions may be called from any thread.

// The extra buffer type of this name; null: the device has none.
ggml_backend_buffer_type_t extra_type(ggml_backend_dev_t device, const char * name);

// The buffer type that llama.cpp would choose for experts of this type and shape on `device`; null: the device's own.
ggml_backend_buffer_type_t packed_layout(ggml_backend_dev_t device, ggml_type type, const matrix_shape & shape,
                                         uint32_t n_experts);

// Does one operation of the device multiply by `n_experts` such matrices, `stride` bytes apart?
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
