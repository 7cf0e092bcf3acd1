// SPDX-License-Identifier: MIT
#include "device/repacked-layout.h"

#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hobbit {

// The largest row group of ggml's layouts.
static constexpr int64_t ROW_GROUP = 16;

bool multiplies_experts(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, ggml_type type,
                        const matrix_shape & shape, size_t stride, int64_t n_experts) {
    const ggml_context_ptr        ctx(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buft, 0));
    ggml_tensor *                 weight  = ggml_new_tensor_3d(ctx.get(), type, shape.n_in, shape.n_out, n_experts);
    ggml_tensor *                 input   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, shape.n_in, 1, 1);
    ggml_tensor *                 ids     = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, 1);
    ggml_tensor *                 product = ggml_mul_mat_id(ctx.get(), weight, input, ids);
    weight->nb[2]                         = stride;
    weight->nb[3]                         = stride * size_t(n_experts);
    weight->buffer                        = buffer.get();
    return ggml_backend_dev_supports_op(device, product);
}

// Returns true if the device multiplies by experts in such a buffer, and they have the same size as in the file.
static bool takes(ggml_backend_dev_t device, ggml_backend_buffer_type_t buft, ggml_type type,
                  const matrix_shape & shape, uint32_t n_experts) {
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_tensor *          weight = ggml_new_tensor_3d(ctx.get(), type, shape.n_in, shape.n_out, n_experts);
    return multiplies_experts(device, buft, type, shape, weight->nb[2], n_experts) &&
           ggml_backend_buft_get_alloc_size(buft, weight) == ggml_nbytes(weight);
}

// The types that ggml may offer beside the device's own, and null behind them.
static ggml_backend_buffer_type_t * extra_types(ggml_backend_dev_t device) {
    static ggml_backend_buffer_type_t none = nullptr;
    const auto                        get_extra =
        (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                                                               "ggml_backend_dev_get_extra_bufts");
    return get_extra ? get_extra(device) : &none;
}

ggml_backend_buffer_type_t extra_type(ggml_backend_dev_t device, const char * name) {
    ggml_backend_buffer_type_t * type = extra_types(device);
    for (; *type && std::strcmp(ggml_backend_buft_name(*type), name) != 0; type++) {
    }
    return *type;
}

ggml_backend_buffer_type_t packed_layout(ggml_backend_dev_t device, ggml_type type, const matrix_shape & shape,
                                         uint32_t n_experts) {
    if (shape.n_out % ROW_GROUP != 0) {
        return nullptr; // a piece might get a different layout from the whole
    }
    for (ggml_backend_buffer_type_t * extra = extra_types(device); *extra; extra++) {
        if (takes(device, *extra, type, shape, n_experts)) {
            return *extra;
        }
    }
    return nullptr;
}

int64_t rows_per_chunk(size_t n_bytes, size_t row_size) {
    return std::max(int64_t(n_bytes / row_size) / ROW_GROUP, int64_t(1)) * ROW_GROUP;
}

// A CPU layout stores its kernels in the tensor. Another device may clear the padding, which is the next slot here.
void init_weights(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    tensor->buffer            = buffer;
    if (!device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        ggml_backend_buffer_init_tensor(buffer, tensor);
    }
}

void set_rows(ggml_backend_buffer_t buffer, ggml_type type, const matrix_shape & rows, const char * src, char * dst,
              ggml_backend_t stream) {
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_tensor *          tensor = ggml_new_tensor_2d(ctx.get(), type, rows.n_in, rows.n_out);
    tensor->data                  = dst;
    init_weights(buffer, tensor);
    if (stream) {
        ggml_backend_tensor_set_async(stream, tensor, src, 0, ggml_nbytes(tensor));
    } else {
        ggml_backend_tensor_set(tensor, src, 0, ggml_nbytes(tensor));
    }
}

void set_zeros(ggml_backend_buffer_t buffer, char * dst, size_t size) {
    if (size > 0) {
        const std::vector<char> zeros(size); // not every device sets memory
        set_rows(buffer, GGML_TYPE_I8, { int64_t(size), 1 }, zeros.data(), dst);
    }
}

} // namespace hobbit
