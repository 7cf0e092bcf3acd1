// SPDX-License-Identifier: MIT
//
// The batches of a model's contexts, one at a time.
#include "engine/hobbit-model.h"

#include <algorithm>
#include <chrono>

using namespace hobbit;

void hobbit_model::keep(const std::exception & e) noexcept {
    if (error_.ok()) {
        error_ = error_of(e, std::move(no_memory_));
    }
}

//
// computing
//

// Waits while another thread's batch holds the model.
void hobbit_model::await_others() {
    released_.wait(mutex_, [&]() REQUIRES(mutex_) { return !holder_ || holder_thread_ == std::this_thread::get_id(); });
}

// Keeps the error: no part of the engine is in a state to go on.
template <typename F>
status hobbit_model::run(F computation) {
    mutex_lock lock(mutex_);
    await_others();
    if (!error_.ok()) {
        return error_;
    }
    try {
        status s = computation();
        if (!s.is_aborted()) {
            error_ = s;
        }
        return s;
    } catch (const std::exception & e) {
        keep(e);
        return error_;
    }
}

status hobbit_model::compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu) {
    return run([&]() REQUIRES(mutex_) -> status {
        GGML_ASSERT(prepared_);
        const auto start  = std::chrono::steady_clock::now();
        const auto is_its = [&](const auto & engine) { return engine->buffer_type_.device == device; };
        const auto engine = std::find_if(engines_.begin(), engines_.end(), is_its);
        GGML_ASSERT(engine != engines_.end());
        for (size_t i = 0; is_filling_ && i < engines_.size(); i++) {
            HOBBIT_TRY(engines_[i]->cache_.await_fill([&] { return inner.is_aborted(); }));
        }
        is_filling_        = false;
        const status s     = (*engine)->executor_->compute(graph, inner, cpu);
        stats_.compute_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
        return s.ok() ? trace_.error() : s;
    });
}

status hobbit_model::look_up(ggml_tensor * lookup) {
    return run([&] {
        const timeline_span span(stats_.events, "embedding");
        return rows_->compute(lookup);
    });
}

//
// batches
//

void hobbit_begin_batch(hobbit_context * context, uint32_t n_tokens, const int32_t * sequences,
                        const int32_t * positions, const int8_t * outputs, bool can_repeat) {
    hobbit_model & m = *context->model;
    m.guard([&] {
        std::vector<int32_t> numbers;
        for (uint32_t i = 0; i < n_tokens; i++) {
            numbers.push_back(context->global(sequences[i]));
        }
        mutex_lock lock(m.mutex_);
        if (m.holder_ && m.holder_ != context && m.holder_thread_ == std::this_thread::get_id()) {
            m.release(); // its thread has gone on
        }
        if (m.holder_ != context) {
            const uint64_t turn = m.n_asked_++;
            m.released_.wait(m.mutex_, [&]() REQUIRES(m.mutex_) { return !m.holder_ && m.n_held_ == turn; });
            m.n_held_++;
        }
        m.holder_ = context;
        m.pass_.emplace(m.stats_.events, "pass", "tokens", n_tokens);
        m.holder_thread_ = std::this_thread::get_id();

        for (uint32_t i = 0; i < n_tokens; i++) {
            if (positions[i] == 0) {
                m.start_sequence(numbers[i]);
            }
        }
        batch_info & batch = m.run_->batch;
        batch.begin(n_tokens, numbers.data(), positions, outputs);
        for (const auto & [sequence, n] : batch.sequences()) {
            m.policy_->begin_tokens(uint32_t(sequence), n);
        }
        if (m.passes_) {
            m.passes_->begin(batch, m.run_->thresholds, can_repeat);
        }
        m.trace_.begin_batch(batch.tokens());
    });
}

void hobbit_end_batch(hobbit_context * context) {
    mutex_lock lock(context->model->mutex_);
    if (context->model->holder_ == context) {
        context->model->release();
    }
}

// Computations that were not announced belong to no batch.
void hobbit_model::release() {
    for (size_t i = 0; prepared_ && i < engines_.size(); i++) {
        engines_[i]->executor_->wait();
    }
    holder_ = nullptr;
    pass_.reset();
    run_->batch = {};
    run_->thresholds.raise({});
    released_.notify_all();
}

bool hobbit_is_draft(const hobbit_context * context) {
    const hobbit_model & m = *context->model;
    mutex_lock           lock(m.mutex_);
    return m.holder_ == context && m.run_->batch.pass() == batch_pass::draft;
}

bool hobbit_repeats_batch(hobbit_context * context, const float * logits, uint32_t n_rows, uint32_t n_vocab) {
    hobbit_model & m       = *context->model;
    bool           repeats = true; // an error fails the second pass
    m.guard([&] {
        mutex_lock lock(m.mutex_);
        if (m.holder_ == context && (!logits || n_rows == m.run_->batch.tokens().size())) {
            repeats = m.passes_ && m.passes_->repeats(m.run_->batch, m.run_->thresholds, logits, n_vocab, m.stats_);
        } else if (m.error_.ok()) {
            m.error_ = status::error("internal error: a batch is judged by the logits of %u tokens, and it has %zu",
                                     n_rows, m.holder_ == context ? m.run_->batch.tokens().size() : 0);
        }
    });
    return repeats;
}

//
// sequences
//

void hobbit_model::start_sequence(int32_t sequence) {
    policy_->begin_sequence(uint32_t(sequence));
    trace_.begin_sequence(sequence);
}

void hobbit_begin_sequence(hobbit_context * context, int32_t sequence) {
    hobbit_model & m = *context->model;
    m.guard([&] {
        const int32_t number = context->global(sequence);
        mutex_lock    lock(m.mutex_);
        m.await_others();
        m.start_sequence(number);
        m.run_->thresholds.clear(number, number + 1);
    });
}

bool hobbit_change_sequence_settings(hobbit_context * context, int32_t sequence, const struct hobbit_setting * changes,
                                     size_t n_changes, char * err, size_t err_size) {
    hobbit_model & m = *context->model;
    return report_call("cannot change the settings", err, err_size, [&]() -> status {
        mutex_lock lock(m.mutex_);
        settings   changed;
        HOBBIT_TRY(m.try_changes(changes, n_changes, changed));
        m.run_->thresholds.set(context->global(sequence), changed.thresholds());
        return {};
    });
}

struct hobbit_precision hobbit_sequence_precision(const hobbit_context * context, int32_t sequence) {
    mutex_lock lock(context->model->mutex_);
    return context->model->run_->thresholds.own(context->global(sequence)).c();
}
