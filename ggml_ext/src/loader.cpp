// SPDX-License-Identifier: MIT
#include "loader.h"

#include <algorithm>

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

// Demands first; a prefetch only while the disk has nothing else to do.
bool loader::next_request(request & next) {
    if (!demand_.empty()) {
        next = demand_.front();
        demand_.pop_front();
        return true;
    }
    if (prefetch_.empty() || prefetching_ || n_demands_ > 0) {
        return false;
    }
    next = prefetch_.front();
    prefetch_.pop_front();
    prefetching_ = next;
    return true;
}

void loader::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        request next;
        work_.wait(lock, [&] { return stop_ || next_request(next); });
        if (stop_) {
            return;
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
    const size_t size         = aligned_span(done.location);
    const bool   was_prefetch = prefetching_ && prefetching_->state == done.state && prefetching_->part == done.part;
    if (was_prefetch) {
        prefetching_.reset();
    } else {
        change_demands(-1);
    }
    if (result.ok()) {
        done.state->arrived     |= part_bit(done.part);
        stats_.bytes_read       += size;
        stats_.bytes_prefetched += was_prefetch ? size : 0;
    } else {
        done.state->requested &= ~part_bit(done.part);
        fail(result);
    }
    progress_.notify_all();
}

void loader::fail(const status & error) {
    if (error_.ok()) {
        error_ = error;
    }
    change_demands(-ptrdiff_t(demand_.size()));
    for (std::deque<request> * queue : { &demand_, &prefetch_ }) {
        for (const request & dropped : *queue) {
            dropped.state->requested &= ~part_bit(dropped.part);
        }
        queue->clear();
    }
}

void loader::change_demands(ptrdiff_t change) {
    const auto now = std::chrono::steady_clock::now();
    if (n_demands_ > 0) {
        stats_.disk_demand_ns += uint64_t(std::chrono::nanoseconds(now - counted_until_).count());
    }
    counted_until_  = now;
    n_demands_     += size_t(change);
}

void loader::submit(load_state & state, uint32_t part, const part_location & location, char * dst,
                    load_urgency urgency) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (state.requested & part_bit(part)) {
        if (urgency == load_urgency::demand) {
            promote(state, part);
        }
        return; // no thread is woken: most of what is asked for is there
    }
    if (!error_.ok()) {
        return;
    }
    state.requested |= part_bit(part);
    if (urgency == load_urgency::demand) {
        change_demands(1);
    }
    (urgency == load_urgency::demand ? demand_ : prefetch_).push_back({ &state, part, location, dst });
    work_.notify_one();
}

void loader::promote(const load_state & state, uint32_t part) {
    const auto is_it = [&](const request & r) { return r.state == &state && r.part == part; };
    if (prefetching_ && is_it(*prefetching_)) {
        prefetching_.reset();
        change_demands(1);
        return;
    }
    const auto it = std::find_if(prefetch_.begin(), prefetch_.end(), is_it);
    if (it != prefetch_.end()) {
        demand_.push_back(*it);
        prefetch_.erase(it);
        change_demands(1);
        work_.notify_one();
    }
}

void loader::cancel(load_state & state) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto                  first =
        std::stable_partition(prefetch_.begin(), prefetch_.end(), [&](const request & r) { return r.state != &state; });
    for (auto it = first; it != prefetch_.end(); ++it) {
        state.requested &= ~part_bit(it->part);
    }
    prefetch_.erase(first, prefetch_.end());
    progress_.notify_all();
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

bool loader::settled(const load_state & state) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state.arrived == state.requested;
}

void loader::settle(const load_state & state) {
    std::unique_lock<std::mutex> lock(mutex_);
    progress_.wait(lock, [&] { return state.arrived == state.requested; });
}

status loader::error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
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
