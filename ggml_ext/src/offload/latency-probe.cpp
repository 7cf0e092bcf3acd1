// SPDX-License-Identifier: MIT
#include "offload/latency-probe.h"

#include "device/device-traits.h"
#include "device/repacked-layout.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "graph/inner-graph.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <thread>

namespace hobbit {

static constexpr int     TRIES         = 3;  // the fastest counts
static constexpr int64_t CPU_TOKENS    = 16; // beside one
static constexpr int64_t DEVICE_TOKENS = 2;  // a driver may take minutes for the kernels of more

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
    probe(const expert_shape & kind, int64_t n_tokens, ggml_backend_t backend) :
        backend_(backend),
        ctx_(ggml_init({ 8 * kind.matrices.size() * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })),
        graph_(ggml_new_graph(ctx_.get())) {
        ggml_tensor * ids = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_I32, 1, n_tokens);
        for (const expert_matrix & m : kind.matrices) {
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

    bool compute(double & seconds) {
        bool ok = true;
        seconds = fastest([&] {
            ok = ok && ggml_backend_graph_compute(backend_, graph_) == GGML_STATUS_SUCCESS;
            wait_until_computed(backend_, ggml_graph_node(graph_, -1));
        });
        return ok;
    }

    bool transfer(ggml_backend_buffer_type_t from, double & seconds) {
        size_t largest = 0;
        for (const ggml_tensor * w : weights_) {
            largest = std::max(largest, ggml_nbytes(w));
        }
        const ggml_backend_buffer_ptr zeros(ggml_backend_buft_alloc_buffer(from, largest));
        if (!zeros) {
            return false;
        }
        ggml_backend_buffer_clear(zeros.get(), 0);
        seconds = fastest([&] {
            for (ggml_tensor * w : weights_) {
                ggml_backend_tensor_set(w, ggml_backend_buffer_get_base(zeros.get()), 0, ggml_nbytes(w));
            }
            wait_until_computed(backend_, weights_.back());
        });
        return true;
    }

  private:
    ggml_backend_t             backend_;
    ggml_context_ptr           ctx_;
    ggml_cgraph *              graph_; // in ctx_
    ggml_backend_buffer_ptr    memory_;
    std::vector<ggml_tensor *> weights_;
};

// A line in the number of tokens.
struct products_line {
    double start     = 0.0;
    double per_token = 0.0;
};

// These are false where there is no memory, or the device failed.
static bool measure_products(const expert_shape & kind, int64_t n_tokens, ggml_backend_t backend, double & seconds) {
    probe p(kind, n_tokens, backend);
    return p.ok() && p.compute(seconds);
}

static bool measure_line(const expert_shape & kind, int64_t n_tokens, ggml_backend_t backend, products_line & line) {
    double first = 0.0;
    double all   = 0.0;
    if (!measure_products(kind, 1, backend, first) || !measure_products(kind, n_tokens, backend, all)) {
        return false;
    }
    line.per_token = std::max(0.0, all - first) / double(n_tokens - 1);
    line.start     = std::max(0.0, first - line.per_token);
    return true;
}

static bool measure_transfer(const expert_shape & kind, ggml_backend_t backend, ggml_backend_buffer_type_t from,
                             double & seconds) {
    probe p(kind, 1, backend);
    return p.ok() && p.transfer(from, seconds);
}

// A device may end the process over a type that it does not know.
static status check_types(const expert_shape & kind, ggml_backend_dev_t device) {
    for (const expert_matrix & m : kind.matrices) {
        const ggml_backend_buffer_type_t memory = ggml_backend_dev_buffer_type(device);
        if (!multiplies_experts(device, memory, m.type, m.shape, m.bytes(), 1)) {
            return status::error(format("%s cannot multiply by experts in %s: choose another device",
                                        ggml_backend_dev_name(device), ggml_type_name(m.type)));
        }
    }
    return {};
}

status measure_latencies(const expert_shapes & kinds, ggml_backend_dev_t device,
                         ggml_backend_buffer_type_t transfer_memory, measured_latencies & found) {
    const ggml_backend_ptr cpu(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    const ggml_backend_ptr other(ggml_backend_dev_init(device, nullptr));
    const status           failed =
        status::error(format("%s cannot compute a single expert: check that the device works, or choose another one",
                             ggml_backend_dev_name(device)));
    if (!cpu || !other) {
        return failed;
    }
    const auto n_cores = int(std::max(1u, std::thread::hardware_concurrency()));
    ggml_backend_cpu_set_n_threads(cpu.get(), threads_beside(device, n_cores));
    size_t largest = 0;
    for (const expert_shape & kind : kinds.all()) {
        const status s = check_types(kind, device);
        if (!s.ok()) {
            return s;
        }
        products_line here;
        products_line there;
        double        transfer = 0.0;
        if (!measure_line(kind, CPU_TOKENS, cpu.get(), here) ||
            !measure_line(kind, DEVICE_TOKENS, other.get(), there) ||
            !measure_transfer(kind, other.get(), transfer_memory, transfer)) {
            return failed;
        }
        found.kinds.push_back({ kind.bytes(), kind.down(), here.start, here.per_token, there.start, there.per_token });
        if (kind.bytes() > largest) { // a transfer's fixed cost counts for less
            largest                 = kind.bytes();
            found.transfer_per_byte = transfer / double(kind.bytes());
        }
    }
    return {};
}

} // namespace hobbit
