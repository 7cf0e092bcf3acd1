// SPDX-License-Identifier: MIT
#include "backend/ggml-hobbit.h"
#include "hobbit.h"

void hobbit_share_queues(ggml_backend_sched_t sched) {
    const int n = ggml_backend_sched_get_n_backends(sched);
    for (int i = 0; i < n; i++) {
        ggml_backend_t                backend = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_hobbit_context * ours    = ggml_backend_hobbit_context_of(backend);
        for (int j = 0; ours && j < n; j++) {
            ggml_backend_t other = ggml_backend_sched_get_backend(sched, j);
            auto &         inner = ours->compute;
            if (other->device == inner.device() && !hobbit::is_host_device(other->device)) {
                inner.share(other);
            }
            ggml_backend_buffer_type_t memory = ggml_backend_sched_get_buffer_type(sched, other);
            if (j != i && other != inner.shared() && ggml_backend_supports_buft(backend, memory)) {
                ours->others.push_back(other);
            }
        }
    }
}

// Answers of the scheduler's hooks (ggml-backend.cpp): in whose queue a backend computes, and whose memory is its own.

static ggml_backend_t get_queue(ggml_backend_t backend) {
    ggml_backend_hobbit_context * ours = ggml_backend_hobbit_context_of(backend);
    return ours && ours->compute.shared() ? ours->compute.shared() : backend;
}

static bool in_queue(ggml_backend_sched_t sched, ggml_backend_buffer_type_t buft, ggml_backend_t backend) {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); i++) {
        ggml_backend_t each = ggml_backend_sched_get_backend(sched, i);
        if (each != backend && ggml_backend_sched_get_buffer_type(sched, each) == buft && get_queue(each) == backend) {
            return true;
        }
    }
    return false;
}

extern ggml_backend_t (*ggml_backend_get_queue)(ggml_backend_t);
extern bool (*ggml_backend_in_queue)(ggml_backend_sched_t, ggml_backend_buffer_type_t, ggml_backend_t);

[[maybe_unused]] static const auto queue_hook = ggml_backend_get_queue = get_queue;
[[maybe_unused]] static const auto memory_hook = ggml_backend_in_queue = in_queue;
