// SPDX-License-Identifier: MIT
#include "modelled-device.h"

#include <chrono>
#include <cstring>
#include <sys/mman.h>
#include <thread>
#include <vector>

namespace modelled {

settings &        config = *new settings;
device_observer * face   = nullptr;

std::map<std::string, std::string> & configured() {
    static auto & values = *new std::map<std::string, std::string>;
    return values;
}

static auto & pinned = *new std::map<const char *, size_t>; // page-locked memory

std::mutex & device_lock() {
    static auto & mutex = *new std::mutex;
    return mutex;
}

// The type of a buffer may be changed by who allocates it.
struct memory_context {
    device_context & device;
    char *           base;
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

void move(const device_context & device, int stream, direction way, const void * source, const void * target,
          size_t size, const ggml_tensor * tensor) {
    const bytes from     = { static_cast<const char *>(source), size };
    const bytes to       = { static_cast<const char *>(target), size };
    const bool  is_taken = stream != NO_STREAM && device.queue == stream;
    copy        c        = { stream, way, from, to, tensor->name, false, is_taken };
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        c.is_pinned = is_pinned(way == direction::to_device ? source : target);
    }
    tell([&](device_observer & o) { o.on_copy(c); });
    linger(stream == NO_STREAM && is_upload(c));
    if (config.compute || way == direction::to_host || size <= MOST_KEPT) { // else pages stay untouched
        std::memmove(const_cast<char *>(to.data), source, size);
    }
    tell([&](device_observer & o) { o.on_copied(c); });
}

void synchronize(int stream) {
    tell([&](device_observer & o) { o.on_synchronize(stream); });
}

//
// buffer
//

static void buffer_free(ggml_backend_buffer_t buffer) {
    memory_context & memory = memory_of(buffer);
    tell([&](device_observer & o) { o.on_free(memory.device.queue, { memory.base, buffer->size }); });
    munmap(memory.base, buffer->size);
    {
        const std::lock_guard<std::mutex> lock(device_lock());
        memory.device.used -= buffer->size;
    }
    delete &memory;
}

static void * buffer_base(ggml_backend_buffer_t buffer) {
    return memory_of(buffer).base;
}

static void buffer_set(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size) {
    const device_context & device = device_of(buffer);
    move(device, device.queue, direction::to_device, data, static_cast<char *>(tensor->data) + offset, size, tensor);
}

static void buffer_get(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size) {
    const device_context & device = device_of(buffer);
    move(device, device.queue, direction::to_host, static_cast<char *>(tensor->data) + offset, data, size, tensor);
    if (device.queue != NO_STREAM) {
        synchronize(device.queue); // the answer comes behind all that was asked before
    }
}

static void set_memory(const device_context & device, char * data, uint8_t value, size_t size) {
    tell([&](device_observer & o) { o.on_clear(device.queue, { data, size }); });
    if (config.compute) {
        std::memset(data, value, size);
    }
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
    move(device, device.queue, direction::on_device, src->data, dst->data, ggml_nbytes(src), dst);
    return true;
}

static ggml_backend_buffer_i buffer_interface() {
    ggml_backend_buffer_i i = {};
    i.free_buffer           = buffer_free;
    i.get_base              = buffer_base;
    i.memset_tensor         = [](ggml_backend_buffer_t b, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
        set_memory(device_of(b), static_cast<char *>(t->data) + offset, value, size);
    };
    i.set_tensor = buffer_set;
    i.get_tensor = buffer_get;
    i.cpy_tensor = buffer_copy;
    i.clear      = [](ggml_backend_buffer_t b, uint8_t value) {
        set_memory(device_of(b), memory_of(b).base, value, b->size);
    };
    return i;
}

//
// buffer types
//

static char * map_pages(size_t size) {
    void * pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? nullptr : static_cast<char *>(pages);
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
    return ggml_backend_buffer_init(buft, buffer_interface(), new memory_context{ device, base }, size);
}

static void free_host(ggml_backend_buffer_t buffer) {
    if (config.one_memory) {
        const bytes memory = { static_cast<char *>(buffer->context), buffer->size };
        tell([&](device_observer & o) { o.on_free(device_of(buffer->buft->device).queue, memory); });
    }
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
        if (config.one_memory) {
            tell([&](device_observer & o) { o.on_allocate(device_of(buft->device).index, { pages, size }); });
        }
        const std::lock_guard<std::mutex> lock(device_lock());
        pinned.emplace(pages, size);
    }
    return buffer;
}

//
// registry
//

static auto & devices = *new std::vector<ggml_backend_device *>;

static void add_device(ggml_backend_reg_t reg) {
    using type     = ggml_backend_buffer_type_t;
    auto * context = new device_context;
    auto * device  = new ggml_backend_device{ device_interface(), reg, context };
    context->index = int(devices.size());
    context->name  = config.name + std::to_string(context->index);

    ggml_backend_buffer_type_i own = {};
    own.get_name                   = [](type buft) { return device_of(buft->device).name.c_str(); };
    own.alloc_buffer               = allocate_memory;
    own.get_alignment              = [](type) { return size_t(128); };
    context->memory                = { own, device, nullptr };

    ggml_backend_buffer_type_i host = ggml_backend_cpu_buffer_type()->iface;
    host.get_name                   = [](type) {
        static const std::string name = config.name + "_Host";
        return name.c_str();
    };
    host.alloc_buffer = allocate_host;
    host.is_host      = [](type) { return true; };
    context->host     = { host, device, nullptr };
    if (config.one_queue) {
        context->queue = open_stream(*context);
    }
    devices.push_back(device);
}

} // namespace modelled

using namespace modelled;

void modelled_configure(const char * text) {
    std::istringstream words(text);
    for (std::string name, value; std::getline(words, name, '=') && words >> value; words >> std::ws) {
        configured()[name] = value;
    }
    configure("name", config.name);
    configure("devices", config.devices);
    configure("events", config.events);
    configure("one_queue", config.one_queue);
    configure("compute", config.compute);
    configure("memory", config.memory);
    configure("one_memory", config.one_memory);
    configure("delay_us", config.delay_us);
}

const char * modelled_report(void) {
    static std::string text;
    text = "{}";
    tell([](device_observer & o) { text = o.report(); });
    return text.c_str();
}

ggml_backend_reg_t ggml_backend_init(void) {
    using registry                      = ggml_backend_reg_t;
    static const ggml_backend_reg_i own = {
        [](registry) { return config.name.c_str(); },
        [](registry) { return devices.size(); },
        [](registry, size_t index) -> ggml_backend_dev_t { return devices[index]; },
        [](registry, const char *) -> void * { return nullptr; },
    };
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, own, nullptr };
    if (devices.empty()) {
        face = make_face().release();
        for (int i = 0; i < config.devices; i++) {
            add_device(&reg);
        }
    }
    return &reg;
}
