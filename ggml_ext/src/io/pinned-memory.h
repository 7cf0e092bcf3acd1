// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "io/file-reader.h"

#include <vector>

namespace hobbit {

// The host memory from which experts are copied to these devices: page-locked, so that a device copies by itself and at
// its link's speed, where the driver of one has such memory and direct I/O reads into it, which is tried on the
// reader's first file; a warning says where that failed. Else the CPU's ordinary memory.
//
// Thread-safety: as ggml's registry. REQUIRES: the reader has a file
ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader);

} // namespace hobbit
