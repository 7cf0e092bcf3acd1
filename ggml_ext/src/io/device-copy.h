// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "model/expert-index.h"

#include <cstddef>

namespace hobbit {

// Copies rows of weights from host memory to one device while the device computes. Where the device copies in streams
// (device_traits), several copies are in flight at once, so that the link does not idle between them.
//
// Thread-safety: none.
class device_copy {
  public:
    explicit device_copy(ggml_backend_dev_t device) : device_(device) {}

    // Begins to copy rows in the file's layout to `dst` in `buffer`, followed by `zeros` zero bytes. REQUIRES: src is
    // constant until finish().
    void begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
               size_t zeros);

    // Blocks until the copies are complete, or queued before the next request to the device.
    void finish();

  private:
    const ggml_backend_dev_t device_;
    ggml_backend_ptr         stream_; // null before the first copy, and where the device has no streams
};

} // namespace hobbit
