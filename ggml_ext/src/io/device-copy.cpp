// SPDX-License-Identifier: MIT
#include "io/device-copy.h"

#include "device/device-traits.h"
#include "device/repacked-layout.h"

namespace hobbit {

void device_copy::begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src,
                        char * dst, size_t zeros) {
    if (!stream_ && traits_of(device_).copies_in_streams) {
        stream_.reset(ggml_backend_dev_init(device_, nullptr));
    }
    set_rows(buffer, type, rows, src, dst, stream_.get());
    set_zeros(buffer, dst + ggml_row_size(type, rows.n_in) * size_t(rows.n_out), zeros);
}

void device_copy::finish() {
    if (stream_) {
        ggml_backend_synchronize(stream_.get());
    }
}

} // namespace hobbit
