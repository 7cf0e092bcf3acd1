// SPDX-License-Identifier: MIT
#include "base/status.h"
#include "doors/layer-hooks.h"
#include "graph/lazy-backend.h"
#include "graph/routing.h"
#include "offload/cpu-rows.h"
#include "offload/cpu-share.h"
#include "predict/predictor.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hobbit {

namespace {

// A copy of a section that computes one token, and outlives the outer graph. Its tensors have no memory. Biases are the
// outer graph's tensors, which belong to the model.
struct section_copy {
    row_copies                       copies;
    std::vector<const ggml_tensor *> nodes;
    const ggml_tensor *              input = nullptr;

    // Null if the section reads more than one row of input.
    static std::unique_ptr<section_copy> make(const layer_section & section) {
        const std::vector<const ggml_tensor *> outer  = nodes_of(section);
        const std::vector<const ggml_tensor *> inputs = cpu_rows::inputs_of(outer);
        const ggml_tensor *                    input  = inputs.front();
        if (inputs.size() > 1 || ggml_nrows(input) != 1 || !ggml_is_contiguous(input)) {
            return nullptr;
        }
        auto made = std::make_unique<section_copy>();
        made->copies.begin(outer.size(), outer.front()->ne[1], 1);
        made->input             = made->stand_in(input);
        ggml_tensor * const ids = made->stand_in(outer.front()->src[2]);
        for (const ggml_tensor * node : outer) {
            if (node->op == GGML_OP_ADD_ID) {
                made->copies.set(node->src[1], node->src[1]);
            }
            ggml_tensor * copy = made->copies.repeat(node);
            if (node->op == GGML_OP_MUL_MAT_ID) {
                copy->src[0] = made->stand_in(node->src[0]);
                copy->src[2] = ids;
            }
            made->nodes.push_back(copy);
        }
        return made;
    }

  private:
    // A tensor of the same shape. The `extra` of an expert's weights names layer and part.
    ggml_tensor * stand_in(const ggml_tensor * outer) {
        ggml_tensor * same = ggml_dup_tensor(copies.ctx(), outer);
        same->extra        = outer->extra;
        copies.set(outer, same);
        return same;
    }
};

// DAOP's pre-calculation (DATE 2025, section IV-C). While a layer runs for a single token, a thread computes the
// experts that the next layer is predicted to use and that host memory has and the device lacks. Their input is the
// running layer's router input in place of the next one's, which is approximate. The rows serve where that layer's
// router then chooses the expert.
//
// Thread-safety: none; the thread only computes graphs that the caller has built.
class early_rows final : public layer_hooks, public ready_rows {
  public:
    // REQUIRES: the parts have a host cache, a predictor and a share, which then takes rows from here
    explicit early_rows(const hook_parts & parts) :
        parts_(parts),
        first_(layer_id(uint32_t(parts.settings.number("hobbit.early_from")))),
        cpu_(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)),
        rows_(parts.index, *parts.host),
        sections_(parts.index.n_layers()) {
        thread_ = std::thread([this] { work(); });
        parts_.share->take_from(this);
    }

    ~early_rows() override {
        parts_.share->take_from(nullptr);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_ended_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    void learn(const layer_section & section, layer_id layer) override {
        if (!sections_[layer]) {
            sections_[layer] = section_copy::make(section);
        }
    }

    const cpu_rows * rows() override { return is_ready_ ? &rows_ : nullptr; }
    void             took(size_t n_uses) override { parts_.counters.of("selections_early") += n_uses; }

    // Waits for the rows of this layer.
    status on_routing(const routed_layer &) override { return finish(); }

    // Predicts the next layer and begins to compute, once for each running layer.
    status before_rest(const routed_layer & layer) override {
        const ggml_tensor * router_input = layer.router_input;
        if (is_started_) { // in another section of the layer
            return {};
        }
        is_ready_       = false;
        const auto next = layer_id(layer.routing.layer + 1);
        if (layer.routing.n_tokens != 1 || layer.batch.pass() == batch_pass::second || next < first_ ||
            next >= sections_.size() || !sections_[next] || !router_input || !parts_.ahead->accepts(router_input)) {
            return {};
        }
        const section_copy & copy = *sections_[next];
        const ggml_tensor *  read = ggml_graph_node(layer.graph, layer.first)->src[1];
        if (ggml_nbytes(router_input) != ggml_nbytes(copy.input) || ggml_nbytes(read) != ggml_nbytes(router_input)) {
            return {};
        }
        set_n_threads(layer.cpu);
        HOBBIT_TRY(cpu_.open());
        HOBBIT_TRY(choose(layer));
        if (uses_.empty()) {
            return {};
        }
        std::vector<const planned_use *> uses;
        for (const planned_use & use : uses_) {
            uses.push_back(&use);
        }
        const std::vector<const char *> inputs = layer.device.read({ router_input, read });
        const char *                    bytes  = inputs.front();
        if (std::memcmp(bytes, inputs.back(), ggml_nbytes(read)) !=
            0) { // the experts do not read what their router reads
            release();
            return {};
        }
        const host_copy input = { copy.input, { bytes, bytes + ggml_nbytes(router_input) } };
        rows_.begin(copy.nodes, predictions_.front(), uses, input, layer.device);
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

    void abandon() override { finish(); } // its error, if any, is of no use now

  private:
    status finish() {
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

    // Pins the predicted experts that host memory alone has.
    status choose(const routed_layer & layer) {
        HOBBIT_TRY(parts_.ahead->predict(layer.routing, 1, layer.router_input, layer.device.backend(), predictions_));
        if (predictions_.empty()) {
            return {};
        }
        const layer_routing & next  = predictions_.front();
        const part_set        parts = parts_.index.layer(next.layer).parts;
        const expert_cache &  host  = *parts_.host;
        for (int32_t i = 0; i < int32_t(next.experts.size()); i++) {
            const expert_id id = { next.layer, uint32_t(next.experts[size_t(i)]) };
            if (!parts_.cache.holds(id, tier_id::high, parts) && host.holds(id, tier_id::high, parts) &&
                host.arrived(id, tier_id::high, parts) && parts_.host->acquire(id, tier_id::high)) {
                uses_.push_back({ id, tier_id::high, { i } });
            }
        }
        return {};
    }

    // Half of the threads that compute the CPU's share: the others compute the running layer.
    void set_n_threads(const inner_graph * cpu) {
        if (cpu && cpu->n_threads() > 0) {
            cpu_.set_n_threads(std::max(1, cpu->n_threads() / 2));
        }
    }

    void release() {
        for (const planned_use & use : uses_) {
            parts_.host->release(use.id, use.tier);
        }
        uses_.clear();
    }

    void work() {
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
                s = error_of(e, no_memory_);
            }
            lock.lock();
            result_ = s;
            is_due_ = false;
            changed_.notify_all();
        }
    }

    const hook_parts parts_;
    const layer_id   first_; // layers before it keep to their own router
    lazy_backend     cpu_;
    cpu_rows         rows_;

    std::vector<std::unique_ptr<section_copy>> sections_; // [layer]; null: not known
    std::vector<layer_routing>                 predictions_;
    std::vector<planned_use>                   uses_; // pinned in host memory
    bool                                       is_started_ = false;
    bool                                       is_ready_   = false;

    std::mutex              mutex_;
    std::condition_variable changed_;
    bool                    is_due_   = false; // guarded by mutex_, as are the next two
    bool                    is_ended_ = false;
    status                  result_;
    status                  no_memory_ = status::error("no memory is left to compute experts a layer early: free some");
    std::thread             thread_;
};

} // namespace

static const registered_hooks maker("early", [](const hook_parts & parts) -> std::unique_ptr<layer_hooks> {
    const bool is_on = parts.settings.number("hobbit.early") != 0;
    return is_on && parts.host && parts.ahead && parts.share ? std::make_unique<early_rows>(parts) : nullptr;
});

} // namespace hobbit
