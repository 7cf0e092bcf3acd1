// SPDX-License-Identifier: MIT
#include "device/aliased-buffer-type.h"

namespace hobbit {

static ggml_backend_buffer_type_t memory_of(ggml_backend_buffer_type_t buft) {
    return static_cast<ggml_backend_buffer_type_t>(buft->context);
}

ggml_backend_buffer_type make_aliased_buffer_type(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device) {
    using type                       = ggml_backend_buffer_type_t;
    ggml_backend_buffer_type_i iface = {};
    iface.get_name                   = [](type buft) { return ggml_backend_dev_name(buft->device); };
    iface.alloc_buffer               = [](type buft, size_t size) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(memory_of(buft), size);
        if (buffer) {
            buffer->buft = buft; // operations on it then belong to the other device
        }
        return buffer;
    };
    iface.get_alignment  = [](type buft) { return ggml_backend_buft_get_alignment(memory_of(buft)); };
    iface.get_max_size   = [](type buft) { return ggml_backend_buft_get_max_size(memory_of(buft)); };
    iface.get_alloc_size = [](type buft, const ggml_tensor * tensor) {
        return ggml_backend_buft_get_alloc_size(memory_of(buft), tensor);
    };
    iface.is_host = [](type buft) { return ggml_backend_buft_is_host(memory_of(buft)); };
    return { iface, device, /* .context = */ memory };
}

} // namespace hobbit
