// SPDX-License-Identifier: MIT
#include "device/device-traits.h"

#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <thread>

namespace hobbit {

// clang-format off
static const device_traits table[] = {
    // a server behind RPC may compute with any of the others, so it gets their bounds
    // backend copies_in   synchronizes spins_on upload_   reads_    load_  counts_in
    //         _streams    _early       _copies  share     past_end  width  _32_bits
    { "CPU",    false,      false,       false,   0.0,      false,    1,     false },
    { "CUDA",   true,       false,       true,    1.0,      true,     8,     true  },
    { "ROCm",   true,       false,       true,    1.0,      true,     8,     true  }, // the same sources
    { "Vulkan", false,      false,       true,    0.25,     false,    8,     true  },
    { "RPC",    false,      true,        false,   0.05,     true,     8,     true  },
};
// clang-format on

const device_traits * find_traits(ggml_backend_dev_t device) {
    const ggml_backend_reg_t reg   = ggml_backend_dev_backend_reg(device); // null: several under one name
    const auto               is_it = [&](const device_traits & t) {
        return reg && std::strcmp(t.backend, ggml_backend_reg_name(reg)) == 0;
    };
    const auto found = std::find_if(std::begin(table), std::end(table), is_it);
    return found == std::end(table) ? nullptr : found;
}

const device_traits & traits_of(ggml_backend_dev_t device) {
    const device_traits * traits = find_traits(device);
    GGML_ASSERT(traits);
    return *traits;
}

bool is_host_device(ggml_backend_dev_t device) {
    return ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device));
}

int threads_beside(ggml_backend_dev_t device, int n_threads) {
    static const auto n_cores = int(std::thread::hardware_concurrency()); // 0: not known
    return !traits_of(device).spins_on_copies || n_cores == 0 ? n_threads
                                                              : std::max(1, std::min(n_threads, n_cores - 1));
}

ggml_backend_buffer_ptr alloc_host_buffer(ggml_backend_t backend, size_t size) {
    ggml_backend_buffer_type_t locked = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
    ggml_backend_buffer_type_t type   = locked ? locked : ggml_backend_cpu_buffer_type();
    return ggml_backend_buffer_ptr(ggml_backend_buft_alloc_buffer(type, size));
}

size_t free_memory(ggml_backend_dev_t device) {
    size_t free  = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    return free;
}

} // namespace hobbit
