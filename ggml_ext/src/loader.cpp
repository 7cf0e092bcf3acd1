// SPDX-License-Identifier: MIT
#include "loader.h"

#include <algorithm>
#include <chrono>

namespace hobbit {

loader::loader(file_reader & reader, stats & stats, uint32_t n_threads) : reader_(reader), stats_(stats) {
    for (uint32_t i = 0; i < n_threads; i++) {
        threads_.emplace_back([this] { run(); });
    }
}

loader::~loader() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    work_.notify_all();
    for (std::thread & thread : threads_) {
        thread.join();
    }
}

void loader::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        work_.wait(lock, [this] { return stop_ || !demand_.empty() || !prefetch_.empty(); });
        if (stop_) {
            return;
        }
        std::deque<request> & queue = demand_.empty() ? prefetch_ : demand_;
        const request         next  = queue.front();
        queue.pop_front();
        if (!error_.ok()) {
            continue; // its waiters have the error already
        }

        lock.unlock();
        const part_location & at     = next.location;
        const size_t          before = data_offset(at);
        const status          result =
            reader_.read_at(at.file, at.offset - before, aligned_span(at), before + at.size, next.dst);
        lock.lock();
        finish(next, result);
    }
}

void loader::finish(const request & done, const status & result) {
    if (result.ok()) {
        done.state->arrived |= part_bit(done.part);
        stats_.bytes_read   += aligned_span(done.location);
    } else if (error_.ok()) {
        error_ = result;
    }
    progress_.notify_all();
}

void loader::submit(load_state & state, uint32_t part, const part_location & location, char * dst,
                    load_urgency urgency) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const bool                  known = state.requested & part_bit(part);
        if (known && urgency == load_urgency::demand) {
            promote(state, part);
        }
        if (known) {
            return;
        }
        state.requested |= part_bit(part);
        (urgency == load_urgency::demand ? demand_ : prefetch_).push_back({ &state, part, location, dst });
    }
    work_.notify_one();
}

void loader::promote(const load_state & state, uint32_t part) {
    const auto it = std::find_if(prefetch_.begin(), prefetch_.end(),
                                 [&](const request & r) { return r.state == &state && r.part == part; });
    if (it != prefetch_.end()) {
        demand_.push_back(*it);
        prefetch_.erase(it);
    }
}

status loader::wait(const load_state & state, uint32_t parts) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto                   done = [&] { return (state.arrived & parts) == parts; };
    if (done()) {
        return error_;
    }

    const auto start = std::chrono::steady_clock::now();
    progress_.wait(lock, [&] { return done() || !error_.ok(); });
    stats_.stall_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
    return error_;
}

void loader::settle(const load_state & state) {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [&] { return state.arrived == state.requested || !error_.ok(); });
}

bool loader::arrived(const load_state & state, uint32_t parts) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return (state.arrived & parts) == parts;
}

uint32_t loader::requested(const load_state & state) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state.requested;
}

void loader::reset(load_state & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    GGML_ASSERT(state.arrived == state.requested);
    state = {};
}

} // namespace hobbit
