// SPDX-License-Identifier: MIT
#include "copy-stream.h"

#include "compute-device.h"
#include "weight-layout.h"

namespace hobbit {

void copy_stream::begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src,
                        char * dst, size_t zeros) {
    if (!stream_ && has_streams(device_)) {
        stream_.reset(ggml_backend_dev_init(device_, nullptr));
    }
    set_rows(buffer, type, rows, src, dst, stream_.get());
    set_zeros(buffer, dst + ggml_row_size(type, rows.n_in) * size_t(rows.n_out), zeros);
}

void copy_stream::finish() {
    if (stream_) {
        ggml_backend_synchronize(stream_.get());
    }
}

} // namespace hobbit
