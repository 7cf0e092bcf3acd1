// SPDX-License-Identifier: MIT
#include "device-parts.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <sys/mman.h>
#include <thread>
#include <vector>

namespace modelled {

settings &        config = *new settings;
device_observer * face   = nullptr;

static auto & pinned = *new std::map<const char *, size_t>; // page-locked memory

std::mutex & device_lock() {
    static auto & mutex = *new std::mutex;
    return mutex;
}

// The type of a buffer may be changed by who allocates it.
struct memory_context {
    device_context & device;
    char *           base;
    size_t           size;
};

static memory_context & memory_of(ggml_backend_buffer_t buffer) {
    return *static_cast<memory_context *>(buffer->context);
}

static device_context & device_of(ggml_backend_buffer_t buffer) {
    return memory_of(buffer).device;
}

//
// copies
//

static bool is_pinned(const void * data) {
    const auto next = pinned.upper_bound(static_cast<const char *>(data));
    return next != pinned.begin() && data < std::prev(next)->first + std::prev(next)->second;
}

void linger(bool has_work) {
    if (has_work && config.delay_us > 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(config.delay_us));
    }
}

static constexpr size_t UPLOAD_SIZE = 4096; // smaller ones are numbers and rows

static bool is_upload(const copy & c) {
    return c.way == direction::to_device && c.source.size >= UPLOAD_SIZE;
}

static constexpr size_t MOST_KEPT = 64 << 10; // bytes of an upload that is no weight, if nothing is computed

void move(const copy & c) {
    tell([&](device_observer & o) { o.on_copy(c); });
    linger(c.stream == NO_STREAM && is_upload(c));
    if (config.compute || c.way == direction::to_host || c.source.size <= MOST_KEPT) { // else pages stay untouched
        std::memmove(const_cast<char *>(c.target.data), c.source.data, c.source.size);
    }
    tell([&](device_observer & o) { o.on_copied(c); });
}

copy copy_of(const device_context & device, int stream, direction way, const void * source, const void * target,
             size_t size, const ggml_tensor * tensor) {
    const void * host = way == direction::to_device ? source : target;
    bool         locked;
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        locked = is_pinned(host);
    }
    const bool is_taken = stream != NO_STREAM && device.queue == stream;
    return { device.index,
             stream,
             way,
             { static_cast<const char *>(source), size },
             { static_cast<const char *>(target), size },
             tensor->name,
             locked,
             is_taken };
}

void synchronize(int stream) {
    tell([&](device_observer & o) { o.on_synchronize(stream); });
}

//
// buffer
//

static void buffer_free(ggml_backend_buffer_t buffer) {
    memory_context & memory = memory_of(buffer);
    tell([&](device_observer & o) {
        o.on_free(memory.device.index, memory.device.queue, { memory.base, memory.size });
    });
    munmap(memory.base, memory.size);
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        memory.device.used -= memory.size;
    }
    delete &memory;
}

static void * buffer_base(ggml_backend_buffer_t buffer) {
    return memory_of(buffer).base;
}

static void buffer_set(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size) {
    const device_context & device = device_of(buffer);
    move(copy_of(device, device.queue, direction::to_device, data, static_cast<char *>(tensor->data) + offset, size,
                 tensor));
}

static void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size) {
    const device_context & device = device_of(buffer);
    move(copy_of(device, device.queue, direction::to_host, static_cast<char *>(tensor->data) + offset, data, size,
                 tensor));
    if (device.queue != NO_STREAM) {
        synchronize(device.queue); // the answer comes behind all that was asked before
    }
}

static void set_memory(const device_context & device, char * data, uint8_t value, size_t size) {
    tell([&](device_observer & o) { o.on_clear(device.index, device.queue, { data, size }); });
    if (config.compute) {
        std::memset(data, value, size);
    }
}

static void buffer_memset(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                          size_t size) {
    set_memory(device_of(buffer), static_cast<char *>(tensor->data) + offset, value, size);
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    set_memory(device_of(buffer), memory_of(buffer).base, value, memory_of(buffer).size);
}

bool is_of(const ggml_tensor * tensor, const device_context & device) {
    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    return buffer->iface.get_base == buffer_base && device_of(buffer).index == device.index;
}

static bool buffer_copy(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const device_context & device = device_of(buffer);
    if (!is_of(src, device)) {
        return false;
    }
    move(copy_of(device, device.queue, direction::on_device, src->data, dst->data, ggml_nbytes(src), dst));
    return true;
}

static ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i i = {};
    i.free_buffer           = buffer_free;
    i.get_base              = buffer_base;
    i.memset_tensor         = buffer_memset;
    i.set_tensor            = buffer_set;
    i.get_tensor            = buffer_get;
    i.cpy_tensor            = buffer_copy;
    i.clear                 = buffer_clear;
    return i;
}

//
// buffer types
//

static char * map_pages(size_t size) {
    void * pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? nullptr : static_cast<char *>(pages);
}

static const char * memory_name(ggml_backend_buffer_type_t buft) {
    return device_of(buft->device).name.c_str();
}

static const char * host_name(ggml_backend_buffer_type_t) {
    static const std::string name = config.name + "_Host";
    return name.c_str();
}

static size_t alignment(ggml_backend_buffer_type_t) {
    return 128;
}

static ggml_backend_buffer_t allocate_memory(ggml_backend_buffer_type_t buft, size_t size) {
    device_context & device = device_of(buft->device);
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        if (device.used + size > config.memory) {
            return nullptr;
        }
        device.used += size;
    }
    char * base = map_pages(size);
    tell([&](device_observer & o) { o.on_allocate(device.index, { base, size }); });
    return ggml_backend_buffer_init(buft, buffer_interface(), new memory_context{ device, base, size }, size);
}

static void free_host(ggml_backend_buffer_t buffer) {
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        pinned.erase(static_cast<char *>(buffer->context));
    }
    munmap(buffer->context, buffer->size);
}

static ggml_backend_buffer_t allocate_host(ggml_backend_buffer_type_t buft, size_t size) {
    char *                pages  = map_pages(size);
    ggml_backend_buffer_t buffer = pages ? ggml_backend_cpu_buffer_from_ptr(pages, size) : nullptr;
    if (buffer) {
        buffer->buft              = buft;
        buffer->iface.free_buffer = free_host;
        const std::lock_guard<std::mutex> lock(device_lock());
        pinned.emplace(pages, size);
    }
    return buffer;
}

static bool is_host(ggml_backend_buffer_type_t) {
    return true;
}

//
// registry
//

static auto & devices = *new std::vector<ggml_backend_device *>;

static const char * registry_name(ggml_backend_reg_t) {
    return config.name.c_str();
}

static size_t registry_count(ggml_backend_reg_t) {
    return devices.size();
}

static ggml_backend_dev_t registry_device(ggml_backend_reg_t, size_t index) {
    return devices[index];
}

static void * registry_function(ggml_backend_reg_t, const char *) {
    return nullptr;
}

static void add_device(ggml_backend_reg_t reg) {
    auto * context = new device_context;
    auto * device  = new ggml_backend_device{ device_interface(), reg, context };
    context->index = int(devices.size());
    context->name  = config.name + std::to_string(context->index);

    ggml_backend_buffer_type_i own = {};
    own.get_name                   = memory_name;
    own.alloc_buffer               = allocate_memory;
    own.get_alignment              = alignment;
    context->memory                = { own, device, nullptr };

    ggml_backend_buffer_type_i host = ggml_backend_cpu_buffer_type()->iface;
    host.get_name                   = host_name;
    host.alloc_buffer               = allocate_host;
    host.is_host                    = is_host;
    context->host                   = { host, device, nullptr };
    if (config.one_queue) {
        context->queue = open_stream(*context);
    }
    devices.push_back(device);
}

static std::string configure(const std::string & text) {
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const size_t      at    = word.find('=');
        const std::string name  = word.substr(0, at);
        const std::string value = at == std::string::npos ? "" : word.substr(at + 1);
        const long        n     = std::atol(value.c_str());

        const std::map<std::string, bool *> flags = {
            { "async", &config.async },
            { "events", &config.events },
            { "host_buffer", &config.host_buffer },
            { "one_queue", &config.one_queue },
            { "fused_router", &config.fused_router },
            { "compute", &config.compute },
        };
        if (flags.count(name) > 0) {
            *flags.at(name) = n != 0;
        } else if (name == "face") {
            config.face = value;
        } else if (name == "name") {
            config.name = value;
        } else if (name == "devices") {
            config.devices = int(n);
        } else if (name == "memory") {
            config.memory = size_t(n);
        } else if (name == "delay_us") {
            config.delay_us = int(n);
        } else {
            return "the modelled device has no setting '" + word + "'";
        }
    }
    if (config.face == "time" && !make_time_face) {
        return "only the library of bench.compare --prices has the face time";
    }
    return {};
}

} // namespace modelled

using namespace modelled;

const char * modelled_configure(const char * text) {
    static std::string error;
    error = devices.empty() ? configure(text) : "the modelled device is loaded already";
    return error.empty() ? nullptr : error.c_str();
}

const char * modelled_report(void) {
    static std::string text;
    text = "{}";
    tell([](device_observer & o) { text = o.report(); });
    return text.c_str();
}

ggml_backend_reg_t ggml_backend_init(void) {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
                                    { registry_name, registry_count, registry_device, registry_function },
                                    nullptr };
    if (devices.empty()) {
        face = config.face == "order"  ? make_order_face(config).release()
               : config.face == "time" ? make_time_face(config).release()
                                       : nullptr;
        for (int i = 0; i < config.devices; i++) {
            add_device(&reg);
        }
    }
    return &reg;
}
