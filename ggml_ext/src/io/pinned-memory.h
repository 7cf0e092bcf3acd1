// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "io/file-reader.h"

#include <vector>

namespace hobbit {

// The host memory from which experts are copied to these devices. Page-locked (pinned) memory lets a device copy by
// itself, at the speed of its link. It is used if the driver of one device provides it and direct I/O can read into it,
// which is tried with the reader's first file; otherwise a warning says so and ordinary memory is used.
//
// Thread-safety: as ggml's registry. REQUIRES: the reader has a file
ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader);

} // namespace hobbit
