// SPDX-License-Identifier: MIT
#pragma once

#include "io/chunk-queue.h"
#include "model/expert.h"

#include <cstddef>
#include <vector>

namespace hobbit {

// The destination of a part. Without a buffer, the file is read in place: data is a multiple of file_reader::alignment
// with room for aligned_span() bytes, and the part begins at data_offset(). With a buffer, which is a device's memory
// or has a repacked layout, rows are read into staging memory and set as they arrive.
struct part_target {
    char *                data;
    ggml_backend_buffer_t buffer = nullptr;
    matrix_shape          shape  = {}; // if there is a buffer
    size_t                zeros  = 0;  // bytes behind the part to set to zero, if there is a buffer
};

// A part as one chunk, whose destination is not known yet. `source` is in host memory; null: the file.
chunk whole_part(load_state & state, part_id part, const part_location & location, const char * source);

// A part in chunks of `size` bytes that are read in place. They begin at offsets that direct I/O accepts. REQUIRES:
// target has no buffer.
std::vector<chunk> chunks_in_place(const chunk & whole, const part_target & target, size_t size);

// A part in chunks of whole row groups, of about `size` bytes each. REQUIRES: target has a buffer.
std::vector<chunk> chunks_of_rows(const chunk & whole, const part_target & target, size_t size);

} // namespace hobbit
