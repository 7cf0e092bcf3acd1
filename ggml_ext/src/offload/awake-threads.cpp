// SPDX-License-Identifier: MIT
#include "offload/awake-threads.h"

#include "ggml-cpu.h"
#include "ggml.h"

#include <cstring>

namespace hobbit {

static bool has_openmp() {
    const ggml_backend_reg_t reg = ggml_backend_cpu_reg();
    const auto get = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (const ggml_backend_feature * f = get ? get(reg) : nullptr; f && f->name; f++) {
        if (std::strcmp(f->name, "OPENMP") == 0) {
            return true;
        }
    }
    return false;
}

awake_threads::awake_threads() :
    ctx_(ggml_init({ 2 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /* .no_alloc = */ true })),
    graph_(ggml_new_graph(ctx_.get())) {
    ggml_tensor * zero = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 1);
    ggml_build_forward_expand(graph_, ggml_add(ctx_.get(), zero, zero)); // an operation of all threads
    if (!has_openmp()) {
        return;
    }
    memory_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_.get(), ggml_backend_cpu_buffer_type()));
    if (memory_) {
        ggml_backend_buffer_clear(memory_.get(), 0);
    }
}

void awake_threads::keep(ggml_backend_t cpu) {
    if (memory_) {
        (void) ggml_backend_graph_compute(cpu, graph_); // that it was aborted is told by what comes next
    }
}

} // namespace hobbit
