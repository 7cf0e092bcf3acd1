// SPDX-License-Identifier: MIT
#include "device/aliased-buffer-type.h"

namespace hobbit {

static ggml_backend_buffer_type_t memory_of(ggml_backend_buffer_type_t buft) {
    return static_cast<ggml_backend_buffer_type_t>(buft->context);
}

static const char * get_name(ggml_backend_buffer_type_t buft) {
    return ggml_backend_dev_name(buft->device);
}

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(memory_of(buft), size);
    if (buffer) {
        buffer->buft = buft; // operations on it then belong to the other device
    }
    return buffer;
}

static size_t get_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(memory_of(buft));
}

static size_t get_max_size(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_max_size(memory_of(buft));
}

static size_t get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    return ggml_backend_buft_get_alloc_size(memory_of(buft), tensor);
}

static bool is_host(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_is_host(memory_of(buft));
}

ggml_backend_buffer_type make_aliased_buffer_type(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device) {
    ggml_backend_buffer_type_i iface = {};
    iface.get_name                   = get_name;
    iface.alloc_buffer               = alloc_buffer;
    iface.get_alignment              = get_alignment;
    iface.get_max_size               = get_max_size;
    iface.get_alloc_size             = get_alloc_size;
    iface.is_host                    = is_host;
    return { iface, device, /* .context = */ memory };
}

} // namespace hobbit
