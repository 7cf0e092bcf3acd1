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

// Keeps the error: no part of the engine is in a state to go on. Waits while another thread's batch holds the model.
template <typename F>
status hobbit_model::run(F computation) {
    mutex_lock lock(mutex_);
    released_.wait(mutex_, [&]() REQUIRES(mutex_) { return !holder_ || holder_thread_ == std::this_thread::get_id(); });
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
        const auto is_its = [&](const auto & engine) { return engine->buffer_type()->device == device; };
        const auto engine = std::find_if(engines_.begin(), engines_.end(), is_its);
        GGML_ASSERT(engine != engines_.end());
        for (size_t i = 0; is_filling_ && i < engines_.size(); i++) {
            HOBBIT_TRY(engines_[i]->cache().await_fill([&] { return inner.is_aborted(); }));
        }
        is_filling_        = false;
        const status s     = (*engine)->executor().compute(graph, inner, cpu);
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

void hobbit_model::begin_batch(const hobbit_context & context, uint32_t n_tokens, const int32_t * sequences,
                               const int32_t * positions, const int8_t * outputs, bool can_repeat) {
    std::vector<int32_t> numbers;
    for (uint32_t i = 0; i < n_tokens; i++) {
        numbers.push_back(context.global(sequences[i]));
    }
    mutex_lock lock(mutex_);
    if (holder_ && holder_ != &context && holder_thread_ == std::this_thread::get_id()) {
        release(); // its thread has gone on
    }
    if (holder_ != &context) {
        const uint64_t turn = n_asked_++;
        released_.wait(mutex_, [&]() REQUIRES(mutex_) { return !holder_ && n_held_ == turn; });
        n_held_++;
    }
    holder_ = &context;
    pass_.emplace(stats_.events, "pass", "tokens", n_tokens);
    holder_thread_ = std::this_thread::get_id();

    for (uint32_t i = 0; i < n_tokens; i++) {
        if (positions[i] == 0) {
            start_sequence(numbers[i]);
        }
    }
    batch_info & batch = run_->batch;
    batch.begin(n_tokens, numbers.data(), positions, outputs);
    for (const auto & [sequence, n] : batch.sequences()) {
        policy_->begin_tokens(uint32_t(sequence), n);
    }
    if (passes_) {
        passes_->begin(batch, run_->thresholds, can_repeat);
    }
    trace_.begin_batch(batch.tokens());
}

void hobbit_model::end_batch(const hobbit_context & context) {
    mutex_lock lock(mutex_);
    if (holder_ == &context) {
        release();
    }
}

// Computations that were not announced belong to no batch.
void hobbit_model::release() {
    for (size_t i = 0; prepared_ && i < engines_.size(); i++) {
        engines_[i]->executor().wait();
    }
    holder_ = nullptr;
    pass_.reset();
    run_->batch = {};
    run_->thresholds.raise({});
    released_.notify_all();
}

bool hobbit_model::is_draft(const hobbit_context & context) const {
    mutex_lock lock(mutex_);
    return holder_ == &context && run_->batch.pass() == batch_pass::draft;
}

bool hobbit_model::repeats_batch(const hobbit_context & context, const float * logits, uint32_t n_rows,
                                 uint32_t n_vocab) {
    mutex_lock lock(mutex_);
    if (holder_ != &context || (logits && n_rows != run_->batch.tokens().size())) {
        if (error_.ok()) {
            error_ = status::error("internal error: a batch is judged by the logits of %u tokens, and it has %zu",
                                   n_rows, holder_ == &context ? run_->batch.tokens().size() : 0);
        }
        return true; // the second pass fails
    }
    return passes_ && passes_->repeats(run_->batch, run_->thresholds, logits, n_vocab, stats_);
}

//
// sequences
//

void hobbit_model::start_sequence(int32_t sequence) {
    policy_->begin_sequence(uint32_t(sequence));
    trace_.begin_sequence(sequence);
}

void hobbit_model::begin_sequence(const hobbit_context & context, int32_t sequence) {
    const int32_t number = context.global(sequence);
    mutex_lock    lock(mutex_);
    released_.wait(mutex_, [&]() REQUIRES(mutex_) { return !holder_ || holder_thread_ == std::this_thread::get_id(); });
    start_sequence(number);
    run_->thresholds.clear(number, number + 1);
}

status hobbit_model::change_settings(const hobbit_context & context, int32_t sequence, const hobbit_setting * changes,
                                     size_t n_changes) {
    mutex_lock lock(mutex_);
    settings   changed;
    HOBBIT_TRY(try_changes(changes, n_changes, changed));
    run_->thresholds.set(context.global(sequence), changed.thresholds());
    return {};
}

hobbit_precision hobbit_model::precision(const hobbit_context & context, int32_t sequence) const {
    mutex_lock lock(mutex_);
    return run_->thresholds.own(context.global(sequence)).c();
}
