// SPDX-License-Identifier: MIT
//
// Streams and events of a modelled device.
#include "modelled-device.h"

#include <cstdint>

namespace modelled {

static int n_streams = 0;
static int n_events  = 0;

struct stream_context {
    int            number;
    ggml_backend_t cpu;
    bool           has_work = false; // since it was synchronized
};

static stream_context & stream_of(ggml_backend_t backend) {
    return *static_cast<stream_context *>(backend->context);
}

static ggml_guid_t guid() {
    static ggml_guid own = { 0x6d, 0x0d, 0xe1, 0x1e, 0xd0, 0x11, 0x02, 0x44,
                             0x3d, 0x6e, 0x93, 0xe9, 0x48, 0xb0, 0x11, 0x9b };
    return &own;
}

static void stream_free(ggml_backend_t backend) {
    stream_context & stream = stream_of(backend);
    ggml_backend_free(stream.cpu);
    delete &stream;
    delete backend;
}

static void stream_set(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    stream_of(backend).has_work = true;
    move(device_of(backend->device), stream_of(backend).number, direction::to_device, data,
         static_cast<char *>(tensor->data) + offset, size, tensor);
}

static void stream_get(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    move(device_of(backend->device), stream_of(backend).number, direction::to_host,
         static_cast<char *>(tensor->data) + offset, data, size, tensor);
}

static void stream_synchronize(ggml_backend_t backend) {
    stream_context & stream = stream_of(backend);
    linger(stream.has_work);
    stream.has_work = false;
    if (device_of(backend->device).queue == NO_STREAM) { // else only an answer says what is done
        synchronize(stream.number);
    }
}

// Within a device, as CUDA: in the stream of the source, and the other one waits for it.
static bool stream_copy(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    const device_context & device = device_of(to->device);
    if (from->device != to->device || !is_of(src, device) || !is_of(dst, device)) {
        return false;
    }
    const int own   = stream_of(from).number;
    const int other = stream_of(to).number;
    move(device, own, direction::on_device, src->data, dst->data, ggml_nbytes(src), dst);
    tell([&](device_observer & o) {
        if (own != other) {
            const int event = n_events++;
            o.on_record(event, own);
            o.on_wait(event, other);
        }
    });
    return true;
}

static ggml_status stream_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    stream_context & stream = stream_of(backend);
    stream.has_work         = true;
    tell([&](device_observer & o) { o.on_compute(stream.number, graph); });
    return config.compute ? ggml_backend_graph_compute(stream.cpu, graph) : GGML_STATUS_SUCCESS;
}

static int number_of(ggml_backend_event_t event) {
    return int(reinterpret_cast<intptr_t>(event->context));
}

static ggml_backend_i stream_interface() {
    ggml_backend_i i = {};
    i.get_name       = [](ggml_backend_t backend) { return device_of(backend->device).name.c_str(); };
    i.free           = stream_free;
    i.synchronize    = stream_synchronize;
    i.graph_compute  = stream_compute;
    if (!config.one_queue) {
        i.set_tensor_async = stream_set;
        i.get_tensor_async = stream_get;
        i.cpy_tensor_async = stream_copy;
    }
    if (config.events) {
        i.event_record = [](ggml_backend_t backend, ggml_backend_event_t event) {
            tell([&](device_observer & o) { o.on_record(number_of(event), stream_of(backend).number); });
        };
        i.event_wait = [](ggml_backend_t backend, ggml_backend_event_t event) {
            tell([&](device_observer & o) { o.on_wait(number_of(event), stream_of(backend).number); });
        };
    }
    return i;
}

static ggml_backend_t open_cpu() {
    ggml_backend_dev_t cpu     = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_t     backend = ggml_backend_dev_init(cpu, nullptr);
    const auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu),
                                                                                      "ggml_backend_set_n_threads");
    set(backend, 1);
    return backend;
}

int open_stream(const device_context & device) {
    int number;
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        number = n_streams++;
    }
    tell([&](device_observer & o) { o.on_open(number, device.index); });
    return number;
}

static ggml_backend_t init_stream(ggml_backend_dev_t dev, const char *) {
    device_context & device = device_of(dev);
    const int        number = device.queue != NO_STREAM ? device.queue : open_stream(device);
    return new ggml_backend{ guid(), stream_interface(), dev, new stream_context{ number, open_cpu() } };
}

//
// device
//

static void device_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    const std::lock_guard<std::mutex> lock(device_lock());
    *free  = config.memory - device_of(dev).used;
    *total = config.memory;
}

static void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props             = {};
    props->name        = dev->iface.get_name(dev);
    props->description = dev->iface.get_description(dev);
    props->type        = dev->iface.get_type(dev);
    device_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.async       = !config.one_queue;
    props->caps.host_buffer = !config.one_queue;
    props->caps.events      = config.events;
}

// Copies weights of the host for many rows, as CUDA does.
static bool device_offloads(ggml_backend_dev_t, const ggml_tensor * op) {
    const int64_t n_rows = op->op == GGML_OP_MUL_MAT_ID ? op->ne[2] : op->ne[1];
    return op->op != GGML_OP_GET_ROWS && n_rows >= 32;
}

ggml_backend_device_i device_interface() {
    using device            = ggml_backend_dev_t;
    ggml_backend_device_i i = {};
    i.get_name              = [](device dev) { return device_of(dev).name.c_str(); };
    i.get_description       = [](device) { return "modelled device"; };
    i.get_memory            = device_memory;
    i.get_type              = [](device) {
        return config.one_memory ? GGML_BACKEND_DEVICE_TYPE_IGPU : GGML_BACKEND_DEVICE_TYPE_GPU;
    };
    i.get_props            = device_props;
    i.init_backend         = init_stream;
    i.get_buffer_type      = [](device dev) { return &device_of(dev).memory; };
    i.get_host_buffer_type = [](device dev) { return config.one_queue ? nullptr : &device_of(dev).host; };
    i.supports_op          = [](device, const ggml_tensor * op) {
        return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
    };
    i.supports_buft = [](device dev, ggml_backend_buffer_type_t buft) {
        return buft == &device_of(dev).memory || (config.one_memory && buft == &device_of(dev).host);
    };
    i.offload_op = device_offloads;
    if (config.events) {
        i.event_new = [](device dev) {
            const std::lock_guard<std::mutex> lock(device_lock());
            return new ggml_backend_event{ dev, reinterpret_cast<void *>(intptr_t(n_events++)) };
        };
        i.event_free        = [](device, ggml_backend_event_t event) { delete event; };
        i.event_synchronize = [](device, ggml_backend_event_t event) {
            tell([&](device_observer & o) { o.on_event_synchronize(number_of(event)); });
        };
    }
    return i;
}

} // namespace modelled
