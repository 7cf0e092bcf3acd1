// SPDX-License-Identifier: MIT
#include "device/compute-device.h"

#include "device/device-traits.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <strings.h>

namespace hobbit {

// The first operation, beside the matmuls over experts, that a layer needs and the device lacks; null: none.
static const char * missing_operation(ggml_backend_dev_t device) {
    const ggml_context_ptr ctx(ggml_init({ 16 * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_tensor *          rows    = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, 256, 2);
    ggml_tensor *          routers = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F16, 256, 2);
    ggml_tensor *          ids     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, 2);
    for (const ggml_tensor * op : { ggml_get_rows(ctx.get(), rows, ids), ggml_set_rows(ctx.get(), rows, rows, ids),
                                    ggml_add(ctx.get(), rows, rows), ggml_mul_mat(ctx.get(), routers, rows) }) {
        if (!ggml_backend_dev_supports_op(device, op)) {
            return ggml_op_name(op->op);
        }
    }
    return nullptr;
}

static status check(ggml_backend_dev_t device) {
    const char * missing = missing_operation(device);
    return missing ? status::error("%s cannot compute experts, which takes %s: choose another device",
                                   ggml_backend_dev_name(device), missing)
                   : status();
}

static status find_device(const std::string & name, ggml_backend_dev_t & device) {
    std::string all;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        device = ggml_backend_dev_get(i);
        if (!find_traits(device)) {
            continue;
        }
        if (strcasecmp(ggml_backend_dev_name(device), name.c_str()) == 0) {
            return check(device);
        }
        all += (all.empty() ? "" : ", ") + std::string(ggml_backend_dev_name(device));
    }
    if (all == "CPU") {
        return status::error("there is no device '%s', and no other GPU: a driver and make install GPU=vulkan find one",
                             name.c_str());
    }
    return status::error("there is no device '%s': choose one of %s", name.c_str(), all.c_str());
}

static status check_together(const std::vector<ggml_backend_dev_t> & devices) {
    for (size_t i = 0; i < devices.size() && devices.size() > 1; i++) {
        const char * name = ggml_backend_dev_name(devices[i]);
        if (is_host_device(devices[i])) {
            return status::error("%s has no memory of its own, as each of several devices must: leave it out of "
                                 "hobbit.device",
                                 name);
        }
        if (std::count(devices.begin(), devices.end(), devices[i]) > 1) {
            return status::error("hobbit.device names %s twice: leave one of them out", name);
        }
    }
    return {};
}

status find_compute_devices(const std::string & names, std::vector<ggml_backend_dev_t> & devices) {
    devices.clear();
    if (names.empty()) {
        devices.push_back(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
        return {};
    }
    for (size_t start = 0; start <= names.size();) {
        const size_t       end    = std::min(names.find(',', start), names.size());
        ggml_backend_dev_t device = nullptr;
        HOBBIT_TRY(find_device(names.substr(start, end - start), device));
        devices.push_back(device);
        start = end + 1;
    }
    return check_together(devices);
}

std::string usable_devices(const std::vector<ggml_backend_dev_t> & devices) {
    std::vector<ggml_backend_dev_t> seen;
    std::string                     names;
    for (ggml_backend_dev_t device : devices) {
        if (!device || is_host_device(device) || std::count(seen.begin(), seen.end(), device) > 0) {
            continue;
        }
        seen.push_back(device);
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU) {
            continue;
        }
        if (find_traits(device) && check(device).ok()) {
            names += (names.empty() ? "" : ",") + std::string(ggml_backend_dev_name(device));
        } else {
            GGML_LOG_WARN("hobbit: %s cannot hold experts: other devices do\n", ggml_backend_dev_name(device));
        }
    }
    return names;
}

} // namespace hobbit
