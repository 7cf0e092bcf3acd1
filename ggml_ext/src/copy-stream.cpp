// SPDX-License-Identifier: MIT
#include "copy-stream.h"

#include "ggml-impl.h"
#include "weight-layout.h"

namespace hobbit {

status copy_stream::open() {
    if (!backend_) {
        backend_.reset(ggml_backend_dev_init(device_, nullptr));
    }
    return backend_ ? status()
                    : status::error(format("%s cannot be opened to copy experts to it: see whether it is still there",
                                           ggml_backend_dev_name(device_)));
}

void copy_stream::begin(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src,
                        char * dst, size_t zeros) {
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_tensor *          tensor = ggml_new_tensor_2d(ctx.get(), type, rows.n_in, rows.n_out);
    tensor->data                  = dst;
    init_weights(buffer, tensor);
    ggml_backend_tensor_set_async(backend_.get(), tensor, src, 0, ggml_nbytes(tensor));
    set_zeros(buffer, dst + ggml_nbytes(tensor), zeros);
}

void copy_stream::finish() {
    ggml_backend_synchronize(backend_.get());
}

} // namespace hobbit
