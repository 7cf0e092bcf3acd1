// SPDX-License-Identifier: MIT
//
// Runs the MUL_MAT_ID cases of llama.cpp's own test-backend-ops, which is linked in as upstream_main, through the
// expert cache: a device that writes a case's experts to a file, opens that as a model with room for half of them, and
// computes with what it reads. Upstream compares with the CPU, and says which error it accepts.
//
//     backend-ops [DEVICE]     the device that holds the pools; default: the CPU
#include "backend/ggml-hobbit.h"
#include "device/device-traits.h"
#include "fixtures/temp-dir.h"
#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "gguf.h"
#include "hobbit.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

int upstream_main(int argc, char ** argv);

static const char * const NAME = "HOBBIT_CASES";

// Upstream quantises random weights for each case: minutes, where there are many experts.
static const char * const FEW_EXPERTS = "n_mats=(1|2|4|16),";

static constexpr size_t MAX_FILE = 256u << 20; // experts of a case that are worth writing

static std::string        compute_name; // name of the device that computes; empty: the CPU
static ggml_backend_dev_t compute;      // it
static ggml_backend_dev_t cached;       // the expert cache's device on it
static size_t             n_computed;

//
// one case
//

static const char * const EXPERTS = "blk.0.ffn_up_exps.weight";

// The case's experts as a layer's first matrices; the others, which every layer has, are not computed with.
static std::string write_experts(const temp_dir & dir, const ggml_tensor * experts, uint32_t n_used) {
    const size_t           others_size = size_t(experts->ne[2]) * sizeof(float);
    const ggml_context_ptr ctx(
        ggml_init({ ggml_nbytes(experts) + others_size + 4 * ggml_tensor_overhead(), nullptr, false }));
    ggml_tensor * copy   = ggml_dup_tensor(ctx.get(), experts);
    ggml_tensor * others = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 1, 1, experts->ne[2]);
    ggml_backend_tensor_get(experts, copy->data, 0, ggml_nbytes(experts));
    ggml_set_zero(others);
    ggml_set_name(copy, EXPERTS);
    ggml_set_name(others, "blk.0.ffn_down_exps.weight");

    const gguf_context_ptr file(gguf_init_empty());
    gguf_set_val_str(file.get(), "general.architecture", "test");
    gguf_set_val_u32(file.get(), "test.expert_count", uint32_t(experts->ne[2]));
    gguf_set_val_u32(file.get(), "test.expert_used_count", n_used);
    gguf_add_tensor(file.get(), copy);
    gguf_add_tensor(file.get(), others);
    const std::string path = dir.path("experts.gguf");
    return gguf_write_to_file(file.get(), path.c_str(), false) ? path : "";
}

static hobbit_model * open_model(const std::string & path, const ggml_tensor * matmul) {
    const ggml_tensor * experts  = matmul->src[0];
    const auto          n_slots  = std::max(experts->ne[2] / 2, matmul->src[2]->ne[0]);
    const int64_t       slot     = int64_t(experts->nb[2]) + 5 * 4096; // direct reads begin and end at whole pages
    char                err[512] = "";
    hobbit_model *      model    = nullptr;
    hobbit_context *    context  = nullptr;

    std::vector<hobbit_setting> settings = { { "hobbit.pools", double(n_slots * slot), nullptr },
                                             { "hobbit.prefetch", 0, nullptr } };
    if (!compute_name.empty()) {
        settings.push_back({ "hobbit.device", 0, compute_name.c_str() });
    }
    const bool ok = hobbit_open(path.c_str(), settings.data(), settings.size(), &model, err, sizeof(err)) && model &&
                    hobbit_place_layers(model, nullptr, 0, true, err, sizeof(err)) &&
                    hobbit_open_context(model, 0, uint32_t(matmul->ne[2]), &context, err, sizeof(err));
    hobbit_close_context(context); // the pools stay
    if (!ok) {
        std::fprintf(stderr, "%s\n", err);
        hobbit_unref(model);
        return nullptr;
    }
    return model;
}

// The same operation on experts without memory of their own.
static ggml_status compute_cached(ggml_backend_t backend, hobbit_model * model, ggml_tensor * matmul) {
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true }));
    const ggml_context_ptr weights(ggml_init({ ggml_tensor_overhead() * 2, nullptr, true }));
    ggml_tensor *          experts = ggml_dup_tensor(weights.get(), matmul->src[0]);
    ggml_set_name(experts, EXPERTS);
    const ggml_backend_buffer_ptr buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), hobbit_buffer_type(model, 0)));

    ggml_tensor * out = ggml_mul_mat_id(ctx.get(), experts, matmul->src[1], matmul->src[2]);
    out->buffer       = matmul->buffer;
    out->data         = matmul->data;
    std::memcpy(out->op_params, matmul->op_params, sizeof(out->op_params));
    ggml_cgraph * graph = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(graph, out);
    return ggml_backend_graph_compute(backend, graph);
}

static ggml_status compute_case(ggml_backend_t backend, ggml_tensor * matmul) {
    const temp_dir    dir;
    const std::string path  = write_experts(dir, matmul->src[0], uint32_t(matmul->src[2]->ne[0]));
    hobbit_model *    model = path.empty() ? nullptr : open_model(path, matmul);
    if (!model) {
        return GGML_STATUS_FAILED;
    }
    const ggml_status status = compute_cached(backend, model, matmul);
    hobbit_unref(model);
    n_computed++;
    return status;
}

//
// the device
//

static const char * get_name(ggml_backend_t) {
    return NAME;
}

static void free_backend(ggml_backend_t backend) {
    ggml_backend_free(static_cast<ggml_backend_t>(backend->context));
    delete backend;
}

static ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    ggml_status status = GGML_STATUS_SUCCESS;
    for (int i = 0; i < ggml_graph_n_nodes(graph) && status == GGML_STATUS_SUCCESS; i++) {
        ggml_tensor * node = ggml_graph_node(graph, i);
        if (node->op == GGML_OP_MUL_MAT_ID) {
            status = compute_case(static_cast<ggml_backend_t>(backend->context), node);
        }
    }
    return status;
}

static ggml_backend_t init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid     guid  = { 0x07, 0x5e };
    const ggml_backend_i iface = {
        get_name, free_backend, nullptr, nullptr, nullptr,       nullptr, nullptr, nullptr,
        nullptr,  nullptr,      nullptr, nullptr, graph_compute, nullptr, nullptr, nullptr,
    };
    return new ggml_backend{ &guid, iface, dev, ggml_backend_dev_init(cached, nullptr) };
}

static const char * get_device_name(ggml_backend_dev_t) {
    return NAME;
}

static void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = *total = 0;
}

static enum ggml_backend_dev_type get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void get_props(ggml_backend_dev_t, ggml_backend_dev_props * props) {
    *props = { NAME, NAME, 0, 0, GGML_BACKEND_DEVICE_TYPE_ACCEL, nullptr, {} };
}

static ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t) {
    return ggml_backend_dev_buffer_type(cached);
}

static bool is_view(const ggml_tensor * op) {
    return op->op == GGML_OP_NONE || op->op == GGML_OP_VIEW;
}

// llama.cpp's requirements for experts: whole tensors, in a type that the device knows, activations in float.
static bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    if (is_view(op)) {
        return true;
    }
    return op->op == GGML_OP_MUL_MAT_ID && op->src[0]->op == GGML_OP_NONE && op->src[1]->type == GGML_TYPE_F32 &&
           ggml_nbytes(op->src[0]) <= MAX_FILE && ggml_backend_dev_supports_op(compute, op);
}

static bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return ggml_backend_dev_supports_buft(cached, buft);
}

static const char * get_reg_name(ggml_backend_reg_t) {
    return NAME;
}

static size_t get_device_count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t get_device(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device device = {
        { get_device_name, get_device_name, get_memory, get_type, get_props, init_backend, get_buffer_type, nullptr,
          nullptr, supports_op, supports_buft, nullptr, nullptr, nullptr, nullptr },
        reg,
        nullptr,
    };
    return &device;
}

static void print_problems(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
        std::fputs(text, stderr);
    }
}

int main(int argc, char ** argv) {
    ggml_log_set(print_problems, nullptr);
    compute_name = argc > 1 ? argv[1] : "";
    std::vector<ggml_backend_dev_t> devices;
    const hobbit::status            s = hobbit::find_compute_devices(compute_name, devices);
    if (!s.ok()) {
        std::fprintf(stderr, "%s\n", s.message().c_str());
        return 1;
    }
    compute                     = devices.front();
    cached                      = ggml_backend_hobbit_register(compute);
    static ggml_backend_reg reg = { GGML_BACKEND_API_VERSION,
                                    { get_reg_name, get_device_count, get_device, nullptr },
                                    nullptr };
    ggml_backend_register(&reg);

    std::vector<std::string> arguments = { argv[0], "test", "-b", NAME, "-o", "MUL_MAT_ID", "-p", FEW_EXPERTS };
    std::vector<char *>      pointers;
    for (std::string & argument : arguments) {
        pointers.push_back(argument.data());
    }
    const int result = upstream_main(int(pointers.size()), pointers.data());
    std::printf("%zu cases went through the expert cache\n", n_computed);
    return n_computed > 0 ? result : 1;
}
