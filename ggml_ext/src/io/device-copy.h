// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "model/expert-index.h"

#include <cstddef>

namespace hobbit {

// Copies rows of weights from host memory to one device, beside what the device computes. Where a backend of ggml's is
// a stream of its own several copies are on their way at once, so that the link does not wait from one to the next.
//
// Thread-safety: none.
class device_copy {
  public:
    explicit device_copy(ggml_backend_dev_t device) : device_(device) {}

    // Begins to copy rows, as the file has them, to `dst` in `buffer`, and so many zeros behind them. REQUIRES: src
    // stays as it is until finish().
    void begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
               size_t zeros);

    // Blocks until all that was begun is there, or in line before what the device is asked for next.
    void finish();

  private:
    const ggml_backend_dev_t device_;
    ggml_backend_ptr         stream_; // null: none was needed yet, or the device has none
};

} // namespace hobbit
