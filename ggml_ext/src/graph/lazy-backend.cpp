// SPDX-License-Identifier: MIT
#include "graph/lazy-backend.h"

namespace hobbit {

status lazy_backend::open() {
    if (inner_) {
        return {};
    }
    if (!shared_) {
        backend_.reset(ggml_backend_dev_init(device_, nullptr));
    }
    if (!backend()) {
        return status::error("%s cannot be opened: choose another device", ggml_backend_dev_name(device_));
    }
    inner_.emplace(backend(), shared_ != nullptr);
    configure();
    return {};
}

void * lazy_backend::find(const char * function) const {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device_), function);
}

void lazy_backend::configure() {
    const auto set_n_threads = (ggml_backend_set_n_threads_t) find("ggml_backend_set_n_threads");
    const auto set_abort     = (ggml_backend_set_abort_callback_t) find("ggml_backend_set_abort_callback");
    if (backend_ && set_n_threads && n_threads_ > 0) {
        set_n_threads(backend_.get(), n_threads_);
    }
    if (backend_ && set_abort) {
        set_abort(backend_.get(), abort_, abort_data_);
    }
    if (inner_) {
        inner_->set_abort_callback(abort_, abort_data_);
        inner_->set_n_threads(n_threads_);
    }
}

void lazy_backend::set_n_threads(int n_threads) {
    n_threads_ = n_threads;
    configure();
}

void lazy_backend::set_abort_callback(ggml_abort_callback callback, void * data) {
    abort_      = callback;
    abort_data_ = data;
    configure();
}

} // namespace hobbit
