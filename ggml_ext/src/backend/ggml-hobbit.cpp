// SPDX-License-Identifier: MIT
#include "backend/ggml-hobbit.h"

#include "ggml-impl.h"
#include "graph/inner-graph.h"
#include "hobbit.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <sys/mman.h>

using hobbit::expert_tensor;
using hobbit::is_expert_matmul;
using hobbit::is_row_lookup;
using hobbit::split_runner;

// Private structs of ggml that our code depends on. Their tables of functions are initialised by position, so a
// function that a newer ggml adds would silently move the others: this fails to compile instead. docs/upgrading.md says
// what to review.

template <typename table>
constexpr size_t n_functions = sizeof(table) / sizeof(void (*)());

static_assert(n_functions<ggml_backend_i> == 16, "ggml_backend_i: review this file");
static_assert(n_functions<ggml_backend_device_i> == 15, "ggml_backend_device_i: review this file");
static_assert(n_functions<ggml_backend_reg_i> == 4, "ggml_backend_reg_i: review this file");
static_assert(n_functions<ggml_backend_buffer_i> == 11, "ggml_backend_buffer_i: review this file");

// Version 3 adds alloc_buffer_n and get_alloc_size_n, whose defaults are right for us; we set this table by name.
static_assert(n_functions<ggml_backend_buffer_type_i> == (GGML_BACKEND_API_VERSION == 2 ? 6 : 8),
              "ggml_backend_buffer_type_i: review this file");
static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3, "the ggml versions that were tried");

static_assert(sizeof(ggml_backend_dev_caps) == 5 * sizeof(bool), "ggml_backend_dev_caps: review this file");

// A node's copy in an inner graph has its operation, parameters, shape and sources; patch 0003 puts the router's
// weights and input into src[3] and src[4] of a MUL_MAT_ID.
static_assert(sizeof(ggml_tensor) == 336 && sizeof(void *) == 8, "ggml_tensor: review inner_graph::add_copy");
static_assert(GGML_MAX_SRC > 4, "MUL_MAT_ID has no room for the router's weights and input");

// A new operation between a layer's matmuls would split the layer.
static_assert(GGML_OP_COUNT == 101, "ggml_op: review n_row_sources");

//
// context
//

// One for each device that experts are computed on.
struct ggml_backend_hobbit_device_context {
    std::string                name;
    std::string                on_disk; // name of the buffer types of models' experts
    ggml_backend_dev_t         compute;
    ggml_backend_buffer_type_t memory;      // buffer type of the device
    ggml_backend_buffer_type   activations; // see activation_type(); unused on the CPU
    ggml_backend_device        device;      // ggml's, whose context this is
};

static ggml_backend_hobbit_device_context & device_context(ggml_backend_dev_t dev) {
    return *(ggml_backend_hobbit_device_context *) dev->context;
}

static ggml_backend_hobbit_context & backend_context(ggml_backend_t backend) {
    return *(ggml_backend_hobbit_context *) backend->context;
}

//
// buffer
//

static split_runner * runner_of(ggml_backend_buffer_t buffer) {
    return (split_runner *) buffer->buft->context;
}

// The context of a buffer is its base.
static void ggml_backend_hobbit_buffer_free(ggml_backend_buffer_t buffer) {
    munmap(buffer->context, buffer->size);
    runner_of(buffer)->unref();
}

static enum ggml_status ggml_backend_hobbit_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (!runner_of(buffer)->owns(tensor->name)) {
        GGML_LOG_ERROR("hobbit: '%s' cannot live in the expert cache: LoRA adapters on routed experts are not "
                       "supported\n",
                       tensor->name);
        return GGML_STATUS_FAILED;
    }
    tensor->extra = const_cast<expert_tensor *>(runner_of(buffer)->find_tensor(tensor->name));
    return GGML_STATUS_SUCCESS;
}

static struct ggml_backend_buffer_i ggml_backend_hobbit_buffer_i() {
    ggml_backend_buffer_i i = {};
    i.free_buffer           = ggml_backend_hobbit_buffer_free;
    i.get_base              = [](ggml_backend_buffer_t buffer) { return buffer->context; };
    i.init_tensor           = ggml_backend_hobbit_buffer_init_tensor;
    i.set_tensor            = [](ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
        GGML_ABORT("%s is read from its file, not set", tensor->name);
    };
    i.get_tensor = [](ggml_backend_buffer_t, const ggml_tensor * tensor, void *, size_t, size_t) {
        GGML_ABORT("%s has no memory of its own", tensor->name);
    };
    i.clear = [](ggml_backend_buffer_t, uint8_t) {};
    return i;
}

//
// buffer type
//

// llama.cpp tells buffer types apart by their names.
static const char * ggml_backend_hobbit_buffer_type_get_name(ggml_backend_buffer_type_t buft) {
    return device_context(buft->device).on_disk.c_str();
}

// Address space that faults when touched.
static ggml_backend_buffer_t ggml_backend_hobbit_buffer_type_alloc_buffer(ggml_backend_buffer_type_t buft,
                                                                          size_t                     size) {
    void * base = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        GGML_LOG_ERROR("hobbit: cannot reserve %zu bytes of address space\n", size);
        return NULL;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buffer_init(buft, ggml_backend_hobbit_buffer_i(), base, size);
    runner_of(buffer)->ref();
    return buffer;
}

static struct ggml_backend_buffer_type_i ggml_backend_hobbit_buffer_type_i() {
    ggml_backend_buffer_type_i i = {};
    i.get_name                   = ggml_backend_hobbit_buffer_type_get_name;
    i.alloc_buffer               = ggml_backend_hobbit_buffer_type_alloc_buffer;
    i.get_alignment              = [](ggml_backend_buffer_type_t) { return size_t(64); };
    return i;
}

bool ggml_backend_buft_is_hobbit(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == ggml_backend_hobbit_buffer_type_get_name;
}

//
// the memory of activations
//

static ggml_backend_buffer_type_t memory_of(ggml_backend_buffer_type_t buft) {
    return (ggml_backend_buffer_type_t) buft->context;
}

// Wraps the buffer type `memory` as a type of `device`. ggml's scheduler assigns an operation to the first backend that
// supports the memory of its operands; with a type of its own, `device` is not mistaken for the owner of `memory`.
static ggml_backend_buffer_type activation_type(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device) {
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

//
// backend
//

static const char * ggml_backend_hobbit_get_name(ggml_backend_t backend) {
    return device_context(backend->device).name.c_str();
}

static void ggml_backend_hobbit_free(ggml_backend_t backend) {
    delete &backend_context(backend);
    delete backend;
}

static void ggml_backend_hobbit_synchronize(ggml_backend_t backend) {
    if (ggml_backend_t shared = backend_context(backend).compute.shared()) {
        ggml_backend_synchronize(shared);
    }
}

static split_runner * find_runner(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (const ggml_tensor * user = is_row_lookup(node) ? node : hobbit::find_matmul(node)) {
            return runner_of(user->src[0]->buffer);
        }
    }
    return nullptr;
}

static hobbit::status compute_split(split_runner * runner, ggml_cgraph * graph, ggml_backend_t backend) {
    ggml_backend_hobbit_context & ctx = backend_context(backend);
    HOBBIT_TRY(ctx.cpu ? ctx.cpu->open() : hobbit::status());

    // a split may begin or end with views that are none of ours, and may hold what is not to be computed this time
    ggml_tensor ** end  = graph->nodes + graph->n_nodes;
    ggml_tensor ** node = std::find_if_not(graph->nodes, end, hobbit::is_noop);
    if (node != end && !is_row_lookup(*node)) {
        return runner->compute(graph, backend->device, ctx.compute.inner(), ctx.cpu ? &ctx.cpu->inner() : nullptr);
    }
    for (; node != end; node = std::find_if_not(node + 1, end, hobbit::is_noop)) {
        GGML_ASSERT(is_row_lookup(*node));
        HOBBIT_TRY(runner->look_up(*node));
    }
    return {};
}

static enum ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_backend_hobbit_context & ctx    = backend_context(backend);
    split_runner *                runner = find_runner(graph);
    hobbit::status                s      = ctx.compute.open();
    std::for_each(ctx.others.begin(), ctx.others.end(), ggml_backend_synchronize);
    if (s.ok() && !runner) {
        return ggml_backend_graph_compute(ctx.compute.backend(), graph);
    }
    if (s.ok()) {
        s = compute_split(runner, graph, backend);
    }
    if (s.is_aborted()) {
        return GGML_STATUS_ABORTED;
    }
    if (!s.ok()) {
        hobbit::set_last_error(s.message());
        GGML_LOG_ERROR("hobbit: %s\n", s.message().c_str());
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

// ggml's callers know no exceptions.
static enum ggml_status ggml_backend_hobbit_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    try {
        return compute_graph(backend, graph);
    } catch (const std::bad_alloc &) {
        GGML_LOG_ERROR("hobbit: no memory is left to compute experts\n");
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception & e) {
        GGML_LOG_ERROR("hobbit: internal error: %s\n", e.what());
        return GGML_STATUS_FAILED;
    }
}

static struct ggml_backend_i ggml_backend_hobbit_i() {
    ggml_backend_i i = {};
    i.get_name       = ggml_backend_hobbit_get_name;
    i.free           = ggml_backend_hobbit_free;
    i.synchronize    = ggml_backend_hobbit_synchronize;
    i.graph_compute  = ggml_backend_hobbit_graph_compute;
    return i;
}

ggml_backend_hobbit_context * ggml_backend_hobbit_context_of(ggml_backend_t backend) {
    return backend->iface.get_name == ggml_backend_hobbit_get_name ? &backend_context(backend) : nullptr;
}

static ggml_guid_t ggml_backend_hobbit_guid() {
    static ggml_guid guid = { 0x5e, 0x0b, 0xb1, 0x7e, 0x24, 0x11, 0x01, 0x43,
                              0x3c, 0x6d, 0x92, 0xe8, 0x47, 0xaf, 0x10, 0x9a };
    return &guid;
}

// Functions that llama.cpp looks for by name.
static void ggml_backend_hobbit_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_hobbit_context & ctx = backend_context(backend);
    ctx.compute.set_n_threads(n_threads);
    if (ctx.cpu) {
        ctx.cpu->set_n_threads(hobbit::threads_beside(ctx.compute.device(), n_threads));
    }
}

static void ggml_backend_hobbit_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    ggml_backend_hobbit_context & ctx = backend_context(backend);
    ctx.compute.set_abort_callback(callback, data);
    if (ctx.cpu) {
        ctx.cpu->set_abort_callback(callback, data);
    }
}

//
// device
//

static void ggml_backend_hobbit_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props                   = {};
    props->name              = dev->iface.get_name(dev);
    props->description       = dev->iface.get_description(dev);
    props->type              = dev->iface.get_type(dev);
    props->caps.mmap_support = true;
}

static ggml_backend_t ggml_backend_hobbit_device_init_backend(ggml_backend_dev_t dev, const char *) {
    return new ggml_backend{
        /* .guid    = */ ggml_backend_hobbit_guid(),
        /* .iface   = */ ggml_backend_hobbit_i(),
        /* .device  = */ dev,
        /* .context = */ new ggml_backend_hobbit_context(device_context(dev).compute),
    };
}

// Activations stay where the CPU has them; another device has them in its own memory.
static ggml_backend_buffer_type_t ggml_backend_hobbit_device_get_buffer_type(ggml_backend_dev_t dev) {
    ggml_backend_hobbit_device_context & ctx = device_context(dev);
    return ggml_backend_buft_is_host(ctx.memory) ? ctx.memory : &ctx.activations;
}

// The scheduler also asks about tensors that are no operations.
static bool ggml_backend_hobbit_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (is_expert_matmul(op) || is_row_lookup(op)) {
        return hobbit::is_of_device(op->src[0], dev);
    }
    return op->op == GGML_OP_NONE ||
           (hobbit::is_between_matmuls(op, dev) && ggml_backend_dev_supports_op(device_context(dev).compute, op));
}

// Accepts inputs in buffers that the device reads in place.
static bool ggml_backend_hobbit_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    if (ggml_backend_buft_is_hobbit(buft)) {
        return buft->device == dev;
    }
    ggml_backend_hobbit_device_context & ctx = device_context(dev);
    ggml_backend_buffer_type_t           own = ggml_backend_hobbit_device_get_buffer_type(dev);
    return buft == own || buft == ctx.memory || (ggml_backend_buft_is_host(own) && ggml_backend_buft_is_host(buft));
}

static struct ggml_backend_device_i ggml_backend_hobbit_device_i() {
    ggml_backend_device_i i = {};
    i.get_name              = [](ggml_backend_dev_t dev) { return device_context(dev).name.c_str(); };
    i.get_description       = [](ggml_backend_dev_t) { return "expert cache"; };
    i.get_memory            = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; };
    i.get_type              = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
    i.get_props             = ggml_backend_hobbit_device_get_props;
    i.init_backend          = ggml_backend_hobbit_device_init_backend;
    i.get_buffer_type       = ggml_backend_hobbit_device_get_buffer_type;
    i.supports_op           = ggml_backend_hobbit_device_supports_op;
    i.supports_buft         = ggml_backend_hobbit_device_supports_buft;
    return i;
}

//
// registry
//

using hobbit_device = ggml_backend_hobbit_device_context;

// Devices that some model has asked for, for as long as the process lives. Guarded by devices_mutex().
static std::vector<hobbit_device *> & devices() {
    static auto & all = *new std::vector<hobbit_device *>;
    return all;
}

static std::mutex & devices_mutex() {
    static auto & mutex = *new std::mutex;
    return mutex;
}

static void * ggml_backend_hobbit_reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    static const std::map<std::string, void *> known = {
        { "ggml_backend_set_n_threads", (void *) ggml_backend_hobbit_set_n_threads },
        { "ggml_backend_set_abort_callback", (void *) ggml_backend_hobbit_set_abort_callback },
    };
    const auto found = known.find(name);
    return found == known.end() ? NULL : found->second;
}

static struct ggml_backend_reg_i ggml_backend_hobbit_reg_i() {
    ggml_backend_reg_i i = {};
    i.get_name           = [](ggml_backend_reg_t) { return "HOBBIT"; };
    i.get_device_count   = [](ggml_backend_reg_t) {
        std::lock_guard<std::mutex> lock(devices_mutex());
        return devices().size();
    };
    i.get_device = [](ggml_backend_reg_t, size_t index) {
        std::lock_guard<std::mutex> lock(devices_mutex());
        return &devices().at(index)->device;
    };
    i.get_proc_address = ggml_backend_hobbit_reg_get_proc_address;
    return i;
}

static ggml_backend_reg_t ggml_backend_hobbit_reg() {
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION, ggml_backend_hobbit_reg_i(), /* .context = */ NULL };
    return &reg;
}

static hobbit_device * make_device(ggml_backend_dev_t compute) {
    const bool                 in_host = hobbit::is_host_device(compute);
    const std::string          name    = in_host ? "HOBBIT" : std::string("HOBBIT_") + ggml_backend_dev_name(compute);
    ggml_backend_buffer_type_t memory  = ggml_backend_dev_buffer_type(compute);
    auto *                     made    = new hobbit_device{ name, "DISK_" + name, compute, memory, {}, {} };
    made->device                       = { ggml_backend_hobbit_device_i(), ggml_backend_hobbit_reg(), made };
    made->activations                  = activation_type(memory, &made->device);
    return made;
}

ggml_backend_dev_t ggml_backend_hobbit_register(ggml_backend_dev_t compute) {
    static std::mutex           registering; // ggml asks for the devices meanwhile
    std::lock_guard<std::mutex> lock(registering);
    hobbit_device *             made = nullptr;
    bool                        is_first;
    {
        std::lock_guard<std::mutex> list_lock(devices_mutex());
        for (hobbit_device * known : devices()) {
            if (known->compute == compute) {
                return &known->device;
            }
        }
        made     = make_device(compute);
        is_first = devices().empty();
        devices().push_back(made);
    }
    if (is_first) {
        ggml_backend_register(ggml_backend_hobbit_reg()); // and the device with it
    } else {
        ggml_backend_device_register(&made->device);
    }
    return &made->device;
}

ggml_backend_buffer_type ggml_backend_hobbit_make_buffer_type(split_runner * runner, ggml_backend_dev_t device) {
    return {
        /* .iface   = */ ggml_backend_hobbit_buffer_type_i(),
        /* .device  = */ device,
        /* .context = */ runner,
    };
}
