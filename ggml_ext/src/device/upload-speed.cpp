// SPDX-License-Identifier: MIT
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "hobbit.h"

#include <algorithm>
#include <chrono>
#include <vector>

double hobbit_measure_upload(const char * device, uint64_t n_bytes) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(ggml_backend_dev_by_name(device));
    ggml_context_ptr           ctx(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
    ggml_tensor *              there = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(n_bytes));
    ggml_backend_buffer_ptr    buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), type));
    std::vector<char>          here(n_bytes);
    double                     least = 0.0;
    for (int i = 0; buffer && i < 3; ++i) {
        const auto start = std::chrono::steady_clock::now();
        ggml_backend_tensor_set(there, here.data(), 0, n_bytes);
        ggml_backend_tensor_get(there, here.data(), 0, 1); // another machine answers to this alone
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        least                                       = i == 0 ? elapsed.count() : std::min(least, elapsed.count());
    }
    return least;
}
