// SPDX-License-Identifier: MIT
#include "latency-probe.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <thread>

namespace hobbit {

static constexpr int     TRIES       = 3; // the fastest counts
static constexpr int64_t MANY_TOKENS = 16;

static double fastest(const std::function<void()> & run) {
    using clock = std::chrono::steady_clock;
    run(); // what is done only once
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < TRIES; i++) {
        const auto start = clock::now();
        run();
        least = std::min(least, std::chrono::duration<double>(clock::now() - start).count());
    }
    return least;
}

// One expert's products for so many tokens, on weights that are all zero.
class probe {
  public:
    probe(const expert_kind & kind, int64_t n_tokens, ggml_backend_t backend) :
        backend_(backend),
        ctx_(ggml_init({ 8 * kind.matrices.size() * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })),
        graph_(ggml_new_graph(ctx_.get())) {
        ggml_tensor * ids = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_I32, 1, n_tokens);
        for (const expert_kind::matrix & m : kind.matrices) {
            ggml_tensor * w = ggml_new_tensor_3d(ctx_.get(), m.type, m.shape.n_in, m.shape.n_out, 1);
            ggml_tensor * x = ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, m.shape.n_in, 1, n_tokens);
            ggml_build_forward_expand(graph_, ggml_mul_mat_id(ctx_.get(), w, x, ids));
            weights_.push_back(w);
        }
        memory_.reset(ggml_backend_alloc_ctx_tensors(ctx_.get(), backend));
        if (memory_) {
            ggml_backend_buffer_clear(memory_.get(), 0);
        }
    }

    bool ok() const { return memory_ != nullptr; }

    double compute() {
        return fastest([&] { ggml_backend_graph_compute(backend_, graph_); });
    }

    double transfer() {
        std::vector<char> zeros;
        for (const ggml_tensor * w : weights_) {
            zeros.resize(std::max(zeros.size(), ggml_nbytes(w)));
        }
        return fastest([&] {
            for (ggml_tensor * w : weights_) {
                ggml_backend_tensor_set(w, zeros.data(), 0, ggml_nbytes(w));
            }
            ggml_backend_synchronize(backend_);
        });
    }

  private:
    ggml_backend_t             backend_;
    ggml_context_ptr           ctx_;
    ggml_cgraph *              graph_; // in ctx_
    ggml_backend_buffer_ptr    memory_;
    std::vector<ggml_tensor *> weights_;
};

status measure_latencies(const expert_kinds & kinds, ggml_backend_dev_t device, measured_latencies & found) {
    const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    const ggml_backend_ptr other(ggml_backend_dev_init(device, nullptr));
    const status           failed = status::error(
        format("%s has no room for a single expert: choose another device", ggml_backend_dev_name(device)));
    if (!cpu || !other) {
        return failed;
    }
    ggml_backend_cpu_set_n_threads(cpu.get(), int(std::max(1u, std::thread::hardware_concurrency())));
    for (const expert_kind & kind : kinds.all()) {
        probe one(kind, 1, cpu.get());
        probe many(kind, MANY_TOKENS, cpu.get());
        probe there(kind, 1, other.get());
        if (!one.ok() || !many.ok() || !there.ok()) {
            return failed;
        }
        const double first     = one.compute();
        const double per_token = std::max(0.0, many.compute() - first) / double(MANY_TOKENS - 1);
        found.kinds.push_back({ kind.bytes(), std::max(0.0, first - per_token), per_token, there.compute() });
        found.transfer_per_byte = there.transfer() / double(kind.bytes());
    }
    return {};
}

} // namespace hobbit
