// SPDX-License-Identifier: MIT
#include "compute-device.h"

#include <strings.h>

namespace hobbit {

// Other backends keep more for a tensor than its bytes: state of their own, or room behind a result.
static bool can_hold_experts(ggml_backend_dev_t device) {
    const std::string backend = ggml_backend_reg_name(ggml_backend_dev_backend_reg(device));
    return backend == "CPU" || backend == "CUDA" || backend == "ROCm" || backend == "Vulkan" || backend == "RPC";
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

} // namespace hobbit
