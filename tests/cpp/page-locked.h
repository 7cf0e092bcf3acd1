// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"

#include <cstddef>
#include <cstdint>

// The buffer type of a driver's page-locked memory, as ggml's backends have it, over ordinary memory.
struct page_locked {
    size_t max_size    = SIZE_MAX; // of a buffer
    size_t n_buffers   = SIZE_MAX; // that there is memory for; ordinary ones come after them, as from ggml's backends
    size_t n_allocated = 0;

    ggml_backend_buffer_type type = {
        { [](ggml_backend_buffer_type_t) { return "Test_Host"; }, alloc_buffer,
          ggml_backend_cpu_buffer_type()->iface.get_alignment, get_max_size,
          ggml_backend_cpu_buffer_type()->iface.get_alloc_size, ggml_backend_cpu_buffer_type()->iface.is_host },
        ggml_backend_cpu_buffer_type()->device,
        this,
    };

    page_locked() = default;

    page_locked(const page_locked &)             = delete;
    page_locked & operator=(const page_locked &) = delete;

  private:
    static page_locked & self(ggml_backend_buffer_type_t buft) { return *static_cast<page_locked *>(buft->context); }

    static size_t get_max_size(ggml_backend_buffer_type_t buft) { return self(buft).max_size; }

    static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
        ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
        if (buffer && self(buft).n_allocated < self(buft).n_buffers) {
            buffer->buft = buft;
            self(buft).n_allocated++;
        }
        return buffer;
    }
};
