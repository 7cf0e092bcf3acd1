// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "graph/inner-graph.h"

#include <optional>

namespace hobbit {

// What computes on a device, opened when something is first computed: llama.cpp's contexts open a backend of every
// device that there is, and a device that only another model uses may be gone.
//
// Thread-safety: none.
class lazy_backend {
  public:
    explicit lazy_backend(ggml_backend_dev_t device) : device_(device) {}

    ggml_backend_dev_t device() const { return device_; }

    // At once where it is open.
    status open();

    // REQUIRES: open
    ggml_backend_t backend() { return backend_.get(); }
    inner_graph &  inner() { return *inner_; }

    // Settings of the backend, where it has them; at any time.
    void set_n_threads(int n_threads);
    void set_abort_callback(ggml_abort_callback callback, void * data);

  private:
    void * find(const char * function) const;
    void   configure();

    const ggml_backend_dev_t   device_;
    ggml_backend_ptr           backend_;
    std::optional<inner_graph> inner_;

    int                 n_threads_  = 0; // 0: not set
    ggml_abort_callback abort_      = nullptr;
    void *              abort_data_ = nullptr;
};

} // namespace hobbit
