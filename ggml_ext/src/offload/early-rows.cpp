// SPDX-License-Identifier: MIT
#include "offload/early-rows.h"

#include <algorithm>

namespace hobbit {

early_rows::early_rows(const expert_index & index, const expert_cache & cache, expert_cache & host, predictor & ahead) :
    index_(index),
    cache_(cache),
    host_(host),
    ahead_(ahead),
    cpu_(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)),
    rows_(index, host),
    sections_(index.n_layers()) {
    cpu_.set_n_threads(int(std::max(1u, std::thread::hardware_concurrency() / 2))); // the others compute this layer
    thread_ = std::thread([this] { work(); });
}

early_rows::~early_rows() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void early_rows::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return is_due_ || is_ended_; });
        if (is_ended_) {
            return;
        }
        lock.unlock();
        status s;
        try {
            s = cpu_.inner().compute();
        } catch (const std::exception & e) {
            s = status::error("no memory is left to compute experts: %s", e.what());
        }
        lock.lock();
        result_ = s;
        is_due_ = false;
        changed_.notify_all();
    }
}

void early_rows::learn(const layer_section & section, layer_id layer) {
    if (!sections_[layer]) {
        sections_[layer] = section_copy::make(section);
    }
}

// Pins the predicted experts that host memory alone has.
status early_rows::choose(const layer_routing & running, const ggml_tensor * router_input, inner_graph & device) {
    HOBBIT_TRY(ahead_.predict(running, 1, router_input, device.backend(), predictions_));
    if (predictions_.empty()) {
        return {};
    }
    const layer_routing & next  = predictions_.front();
    const part_set        parts = index_.layer(next.layer).parts;
    for (int32_t i = 0; i < int32_t(next.experts.size()); i++) {
        const expert_id id = { next.layer, uint32_t(next.experts[size_t(i)]) };
        if (!cache_.holds(id, tier_id::high, parts) && host_.holds(id, tier_id::high, parts) &&
            host_.arrived(id, tier_id::high, parts) && host_.acquire(id, tier_id::high)) {
            uses_.push_back({ id, tier_id::high, { i } });
        }
    }
    return {};
}

status early_rows::start(const layer_routing & running, const ggml_tensor * router_input, inner_graph & device) {
    if (is_started_) { // in another section of the layer
        return {};
    }
    is_ready_       = false;
    const auto next = layer_id(running.layer + 1);
    if (running.n_tokens != 1 || next >= sections_.size() || !sections_[next] || !router_input ||
        !ahead_.accepts(router_input)) {
        return {};
    }
    const section_copy & copy = *sections_[next];
    if (ggml_nbytes(router_input) != ggml_nbytes(copy.input())) {
        return {};
    }
    HOBBIT_TRY(cpu_.open());
    HOBBIT_TRY(choose(running, router_input, device));
    if (uses_.empty()) {
        return {};
    }
    std::vector<const planned_use *> uses;
    for (const planned_use & use : uses_) {
        uses.push_back(&use);
    }
    const char *    bytes = device.read({ router_input }).front();
    const host_copy input = { copy.input(), { bytes, bytes + ggml_nbytes(router_input) } };
    rows_.begin(copy.section(), predictions_.front(), uses, input, device);
    const status s = rows_.begin_next(cpu_.inner());
    if (!s.ok()) {
        release();
        return s;
    }
    is_started_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_due_ = true;
    }
    changed_.notify_all();
    return {};
}

status early_rows::finish() {
    if (!is_started_) {
        return {};
    }
    is_started_ = false;
    status s;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !is_due_; });
        s = result_;
    }
    release();
    if (s.ok()) {
        rows_.end_next();
        is_ready_ = true;
    }
    return s;
}

void early_rows::release() {
    for (const planned_use & use : uses_) {
        host_.release(use.id, use.tier);
    }
    uses_.clear();
}

} // namespace hobbit
