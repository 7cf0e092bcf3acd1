// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "graph/inner-graph.h"

#include <optional>

namespace hobbit {

// The backend of a device, opened when it is first used. llama.cpp's contexts create a backend for every registered
// device, and a device that only another model uses may have disappeared.
//
// Thread-safety: none.
class lazy_backend {
  public:
    explicit lazy_backend(ggml_backend_dev_t device) : device_(device) {}

    ggml_backend_dev_t device() const { return device_; }

    // Computes in the queue of this backend of the device, behind what its owner has begun there, and opens none. It
    // must outlive every computation. REQUIRES: not open
    void share(ggml_backend_t other) { shared_ = other; }

    // Does nothing if the backend is open.
    status open() {
        if (inner_) {
            return {};
        }
        if (!shared_) {
            backend_.reset(ggml_backend_dev_init(device_, nullptr));
        }
        if (!backend()) {
            return status::error("%s cannot be opened: choose another device", ggml_backend_dev_name(device_));
        }
        inner_.emplace(backend(), shared_ != nullptr, &caller_);
        configure();
        return {};
    }

    // REQUIRES: open
    ggml_backend_t backend() { return shared_ ? shared_ : backend_.get(); }
    inner_graph &  inner() { return *inner_; }

    // The backend whose queue it shares; null: none.
    ggml_backend_t shared() const { return shared_; }

    // Settings of the backend, ignored if it has no such setting. May be called at any time.
    void set_n_threads(int n_threads) {
        caller_.n_threads = n_threads;
        configure();
    }

    void set_abort_callback(ggml_abort_callback callback, void * data) {
        caller_.abort      = callback;
        caller_.abort_data = data;
        configure();
    }

  private:
    void * find(const char * function) const {
        return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device_), function);
    }

    void configure() {
        const auto set_n_threads = (ggml_backend_set_n_threads_t) find("ggml_backend_set_n_threads");
        const auto set_abort     = (ggml_backend_set_abort_callback_t) find("ggml_backend_set_abort_callback");
        if (backend_ && set_n_threads && caller_.n_threads > 0) {
            set_n_threads(backend_.get(), caller_.n_threads);
        }
        if (backend_ && set_abort) {
            set_abort(backend_.get(), caller_.abort, caller_.abort_data);
        }
    }

    const ggml_backend_dev_t   device_;
    ggml_backend_t             shared_ = nullptr;
    ggml_backend_ptr           backend_; // null while it shares another's queue
    caller_settings            caller_;
    std::optional<inner_graph> inner_;
};

} // namespace hobbit
