// SPDX-License-Identifier: MIT
#include "compute-device.h"

#include <strings.h>

namespace hobbit {

// Accelerators, and this backend's own devices, compute with what lies in other devices' memory.
static bool can_hold_experts(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

status find_compute_device(const std::string & name, ggml_backend_dev_t & device) {
    if (name.empty()) {
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        return {};
    }
    std::string all;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        device = ggml_backend_dev_get(i);
        if (!can_hold_experts(device)) {
            continue;
        }
        if (strcasecmp(ggml_backend_dev_name(device), name.c_str()) == 0) {
            return {};
        }
        all += (all.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    return status::error(format("there is no device '%s': choose one of %s", name.c_str(), all.c_str()));
}

bool is_host_device(ggml_backend_dev_t device) {
    return ggml_backend_buft_is_host(ggml_backend_dev_buffer_type(device));
}

ggml_backend_buffer_type_t staging_buffer_type(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t locked = ggml_backend_dev_host_buffer_type(device);
    return locked && !is_host_device(device) ? locked : ggml_backend_cpu_buffer_type();
}

} // namespace hobbit
