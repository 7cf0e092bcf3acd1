// SPDX-License-Identifier: MIT
#pragma once

#include "expert-index.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "status.h"

#include <cstddef>

namespace hobbit {

// Copies rows of weights from host memory to one device, in a stream beside that in which the device computes. Several
// are on their way at once, so that the link does not wait from one to the next.
//
// Thread-safety: none.
class copy_stream {
  public:
    explicit copy_stream(ggml_backend_dev_t device) : device_(device) {}

    // At once where it is open; an error where the device is gone.
    status open();

    // Begins to copy rows, as the file has them, to `dst` in `buffer`, and as many zeros behind them. REQUIRES: open;
    // src stays as it is until finish().
    void begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
               size_t zeros);

    // Blocks until all that was begun is there.
    void finish();

  private:
    const ggml_backend_dev_t device_;
    ggml_backend_ptr         backend_;
};

} // namespace hobbit
