// SPDX-License-Identifier: MIT
#include "device/device-traits.h"

#include "ggml-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <strings.h>
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

bool shares_memory(ggml_backend_dev_t device, ggml_backend_buffer_type_t memory) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU && ggml_backend_buft_is_host(memory) &&
           ggml_backend_dev_supports_buft(device, memory);
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
    const bool        is_remote = strncasecmp(name.c_str(), "RPC", 3) == 0 && all.find("RPC") == std::string::npos;
    const std::string hint      = is_remote      ? ": give --rpc HOST:PORT, the address of its 'pyhobbit worker'"
                                  : all == "CPU" ? ", and no other GPU: a driver and make install GPU=vulkan find one"
                                                 : ": choose one of " + all;
    return status::error("there is no device '%s'%s", name.c_str(), hint.c_str());
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
        const size_t end = std::min(names.find(',', start), names.size());
        HOBBIT_TRY(find_device(names.substr(start, end - start), devices.emplace_back()));
        start = end + 1;
    }
    return check_together(devices);
}

std::string usable_devices(const std::vector<ggml_backend_dev_t> & devices) {
    std::set<ggml_backend_dev_t> seen;
    std::string                  names;
    for (ggml_backend_dev_t device : devices) {
        if (!device || is_host_device(device) || !seen.insert(device).second ||
            ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_IGPU) {
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

//
// layouts of weights
//

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
