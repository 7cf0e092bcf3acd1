// SPDX-License-Identifier: MIT
#include "io/loader.h"

#include "device/device-traits.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hobbit {

loader::loader(file_reader & reader, stats & stats, uint32_t n_threads, const std::vector<ggml_backend_dev_t> & devices,
               ggml_backend_buffer_type_t staging, std::chrono::milliseconds patience, awake_clock clock) :
    reader_(reader),
    stats_(stats),
    staging_memory_(ggml_backend_buft_alloc_buffer(staging, staging_size(n_threads) + HUGE_PAGE)),
    patience_(patience),
    disk_(std::max(n_threads, 2u) - 1),
    clock_(std::move(clock)),
    reading_since_(n_threads, steady::time_point::max()) {
    for (ggml_backend_dev_t device : devices) {
        if (!is_host_device(device)) {
            links_.try_emplace(device);
        }
    }
    try {
        for (uint32_t i = 0; i < n_threads; i++) {
            threads_.emplace_back([this, i] { run([this, i]() REQUIRES(mutex_) { run_reads(i); }); });
        }
        for (auto & entry : links_) {
            threads_.emplace_back(
                [this, device = entry.first] { run([this, device]() REQUIRES(mutex_) { run_copies(device); }); });
        }
    } catch (const std::exception &) { // the system has no more threads
        join();
        throw;
    }
}

loader::~loader() {
    join();
}

// Allocates nothing, as stop().
void loader::join() {
    {
        mutex_lock lock(mutex_);
        stop();
    }
    for (std::thread & thread : threads_) {
        thread.join();
    }
}

void loader::stop() {
    stop_ = true;
    each_lane([](lane & l) { l.work.notify_all(); });
}

loader::link & loader::link_of(ggml_backend_buffer_t buffer) {
    return links_.at(ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer)));
}

void loader::run(const std::function<void()> & work) {
    mutex_lock lock(mutex_);
    try {
        work();
    } catch (const std::exception & e) {
        give_up(e);
    }
}

// A chunk may be lost.
void loader::give_up(const std::exception & e) {
    if (error_.ok()) {
        error_ = error_of(e, std::move(no_memory_));
    }
    is_broken_ = true;
    progress_.notify_all();
}

void loader::run_reads(size_t thread) {
    timeline::name_thread("reads from the disk");
    char * lent = staging_memory_ ? aligned_base(staging_memory_.get(), HUGE_PAGE) + thread * chunk_size : nullptr;
    staging_buffer     staging(lent, lent ? chunk_size : 0);
    std::vector<chunk> next;
    while (true) {
        disk_.work.wait(mutex_, [&]() REQUIRES(mutex_) { return stop_ || (error_.ok() && disk_.queue.take(0, next)); });
        if (stop_) {
            progress_.notify_all(); // end() waits for this
            return;
        }

        reading_since_[thread] = clock_.now();
        status result;
        try {
            mutex_release released(mutex_);
            result = read(next.front(), staging);
        } catch (...) {
            reading_since_[thread] = steady::time_point::max();
            throw;
        }
        reading_since_[thread] = steady::time_point::max();
        finish(next.front(), result);
    }
}

size_t loader::link::bytes_in(double seconds) const {
    return done.ns > 0 ? size_t(seconds * 1e9 * double(done.bytes) / double(done.ns)) : 0;
}

// Starting a copy takes microseconds, and learning of its end some tens. The device's computation also copies a little
// and may have to wait for one of these copies.
static constexpr double COPY_TIME  = 5e-5;
static constexpr double BATCH_TIME = 5e-4;

void loader::run_copies(ggml_backend_dev_t device) {
    ggml_backend_ptr stream; // opened for the first copy, where the device has streams
    link &           own = links_.at(device);
    timeline::name_thread("copies to a device");
    std::vector<chunk> next;
    while (true) {
        own.copies.work.wait(mutex_, [&]() REQUIRES(mutex_) {
            return stop_ || own.copies.queue.take(own.bytes_in(BATCH_TIME), next);
        });
        if (stop_) {
            return;
        }

        {
            mutex_release released(mutex_);
            copy(device, next, stream);
        }
        for (const chunk & c : next) {
            finish(c, {}); // the next computation reports a lost device
        }
    }
}

// Copies chunks while the device computes. Several copies of a stream are in flight, so that the link does not idle.
void loader::copy(ggml_backend_dev_t device, const std::vector<chunk> & chunks, ggml_backend_ptr & stream) {
    size_t        bytes = 0;
    timeline_span span(stats_.events, "upload");
    change_transfers(device, 1, 0);
    if (!stream && traits_of(device).copies_in_streams) {
        stream.reset(ggml_backend_dev_init(device, nullptr));
    }
    for (const chunk & c : chunks) {
        set_rows(c.to.buffer, c.type, c.to.shape, c.source, c.to.data, stream.get());
        set_zeros(c.to.buffer, c.to.data + c.size, c.to.zeros);
        bytes += c.size;
    }
    if (stream) {
        ggml_backend_synchronize(stream.get());
    }
    change_transfers(device, -1, bytes);
    span.note("bytes", int64_t(bytes));
}

status loader::read(const chunk & next, staging_buffer & staging) {
    const size_t before = data_offset(next);
    const size_t span   = aligned_span(next);
    char *       dst    = next.to.data;
    if (next.to.buffer) {
        if (!staging.reserve(span)) {
            return status::error("no memory left to read experts (%zu bytes)", span);
        }
        dst = staging.data();
    }
    {
        const timeline_span event(stats_.events, "read", "bytes", int64_t(span));
        HOBBIT_TRY(reader_.read_at(next.file, next.offset - before, span, before + next.size, dst));
    }
    if (next.to.buffer) {
        set(next, dst + before);
    } else {
        std::memset(dst + before + next.size, 0, next.to.zeros);
    }
    return {};
}

void loader::set(const chunk & next, const char * rows) {
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(next.to.buffer));
    const timeline_span      event(stats_.events, "convert", "bytes", int64_t(next.size));
    if (device && is_host_device(device)) { // the CPU's own layouts are no host memory to ggml
        set_rows(next.to.buffer, next.type, next.to.shape, rows, next.to.data);
        return;
    }
    change_transfers(device, 1, 0);
    set_rows(next.to.buffer, next.type, next.to.shape, rows, next.to.data);
    set_zeros(next.to.buffer, next.to.data + next.size, next.to.zeros);
    change_transfers(device, -1, next.size);
}

void loader::change_transfers(ggml_backend_dev_t device, int change, size_t n_bytes) {
    mutex_lock lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    link &     to  = links_.at(device);
    if (to.n_in_flight > 0) {
        const auto ns       = uint64_t(std::chrono::nanoseconds(now - to.counted_until).count());
        to.done.ns         += ns;
        stats_.transfer_ns += ns;
    }
    to.counted_until          = now;
    to.n_in_flight           += change;
    to.done.bytes            += n_bytes;
    stats_.bytes_transferred += n_bytes;
}

loader::transfers loader::transferred(ggml_backend_dev_t device) const {
    mutex_lock lock(mutex_);
    const auto found = links_.find(device);
    return found == links_.end() ? transfers() : found->second.done;
}

void loader::finish(const chunk & done, const status & result) {
    const size_t size         = done.source ? 0 : aligned_span(done); // read from disk
    const bool   was_prefetch = lane_of(done).queue.end(done);
    if (result.ok()) {
        stats_.reads            += size > 0;
        stats_.bytes_read       += size;
        stats_.bytes_prefetched += was_prefetch ? size : 0;
    }
    end_chunk(done, result.ok());
    if (!result.ok()) {
        fail(result);
    }
}

// The last chunk of a part ends the part.
void loader::end_chunk(const chunk & ended, bool ok) {
    load_state &  state = *ended.state;
    const part_id part  = ended.part;
    if (!ok) {
        state.failed |= part;
    }
    if (--state.n_chunks[part] > 0) {
        return;
    }
    const bool arrived = !(state.failed & part);
    if (arrived) {
        state.arrived |= part;
    } else {
        state.requested -= part;
    }
    state.begun  -= part;
    state.failed -= part;
    end_parked(state, part, arrived);
    progress_.notify_all();
}

// Copies that wait for the part begin now, or are dropped.
void loader::end_parked(const load_state & from, part_id part, bool ok) {
    const auto waits = [&](const parked_copy & p) { return p.from == &from && p.what.part == part; };
    for (const parked_copy & p : extract_if(parked_, waits)) {
        if (ok) {
            enqueue({ p.what }, p.urgency);
        } else {
            end_chunk(p.what, false);
        }
    }
}

void loader::fail(const status & error) {
    if (error_.ok()) {
        error_ = error;
    }
    each_lane([&](lane & l) REQUIRES(mutex_) {
        for (const chunk & dropped : l.queue.clear()) {
            end_chunk(dropped, false);
        }
    });
    for (const parked_copy & p : std::exchange(parked_, {})) {
        end_chunk(p.what, false);
    }
    progress_.notify_all();
}

// Returns true if the part has yet to be requested. A demand promotes an earlier prefetch of the part.
bool loader::is_due(const load_state & state, part_id part, load_urgency urgency) {
    if (state.arrived & part) {
        return false; // the most frequent case
    }
    if (state.requested & part) {
        if (urgency == load_urgency::demand) {
            promote(state, part);
        }
        return false; // no thread is woken
    }
    return error_.ok();
}

void loader::submit(load_state & state, part_id part, const part_location & location, const part_target & target,
                    load_urgency urgency) {
    mutex_lock lock(mutex_);
    if (is_due(state, part, urgency)) {
        const chunk whole  = { location, &state, part, nullptr, target };
        const auto  chunks = target.buffer ? chunks_of_rows(whole, chunk_size - 2 * file_reader::alignment)
                                           : chunks_in_place(whole, chunk_size);
        mark_requested(chunks);
        enqueue(chunks, urgency);
    }
}

void loader::transfer(load_state & state, part_id part, const load_state & from, const char * source,
                      const part_location & location, const part_target & target, load_urgency urgency) {
    GGML_ASSERT(target.buffer);
    mutex_lock lock(mutex_);
    if (!is_due(state, part, urgency)) {
        return;
    }
    const link & to     = link_of(target.buffer);
    const size_t size   = std::max(chunk_size, to.bytes_in(COPY_TIME));
    const auto   chunks = chunks_of_rows({ location, &state, part, source, target }, size);
    mark_requested(chunks);
    if (from.arrived & part) {
        enqueue(chunks, urgency);
        return;
    }
    for (const chunk & c : chunks) {
        parked_.push_back({ c, &from, urgency });
    }
}

// All chunks of a part.
void loader::mark_requested(const std::vector<chunk> & chunks) {
    load_state &  state   = *chunks.front().state;
    const part_id part    = chunks.front().part;
    state.n_chunks[part]  = uint32_t(chunks.size());
    state.requested      |= part;
}

void loader::enqueue(const std::vector<chunk> & chunks, load_urgency urgency) {
    lane & to = lane_of(chunks.front());
    to.queue.push(chunks, urgency);
    wake(to, chunks.size());
}

// Wakes as many threads as there are chunks to begin.
void loader::wake(lane & where, size_t n_chunks) {
    for (size_t i = 0; i < std::min(n_chunks, threads_.size()); i++) {
        where.work.notify_one();
    }
}

void loader::promote(const load_state & state, part_id part) {
    each_lane([&](lane & l) REQUIRES(mutex_) { wake(l, l.queue.promote(state, part)); });
    for (parked_copy & p : parked_) {
        p.urgency = p.what.is_of(state, part) ? load_urgency::demand : p.urgency;
    }
}

void loader::cancel(load_state & state) {
    mutex_lock lock(mutex_);
    drop_prefetches(state, part_set::all() - state.begun);
    progress_.notify_all();
}

void loader::abandon(load_state & state) {
    mutex_lock lock(mutex_);
    drop_prefetches(state, part_set::all());
    if (state.arrived != state.requested) {
        stall([&]() REQUIRES(mutex_) { return state.arrived == state.requested || is_broken_; });
    }
}

// Drops prefetches of `parts`. A part with a chunk read or in flight then counts as failed.
void loader::drop_prefetches(load_state & state, part_set parts) {
    each_lane([&](lane & l) REQUIRES(mutex_) {
        for (const chunk & dropped : l.queue.drop_prefetches(state, parts)) {
            end_chunk(dropped, false);
        }
    });
    const auto is_dropped = [&](const parked_copy & p) {
        return p.urgency == load_urgency::prefetch && p.what.is_of(state, parts);
    };
    for (const parked_copy & p : extract_if(parked_, is_dropped)) {
        end_chunk(p.what, false);
    }
}

status loader::wait(const load_state & state, part_set parts) {
    mutex_lock lock(mutex_);
    const auto done = [&] { return state.arrived.has(parts); };
    if (done()) {
        return error_;
    }

    stall([&]() REQUIRES(mutex_) { return done() || !error_.ok(); });
    return error_;
}

void loader::stall(const std::function<bool()> & is_over) {
    const timeline_span event(stats_.events, "wait");
    const auto          start = steady::now();
    wait_until(is_over);
    stats_.stall_ns += std::chrono::nanoseconds(steady::now() - start).count();
}

loader::steady::duration loader::age_of_oldest_read() const {
    const auto now    = clock_.now();
    const auto oldest = std::min_element(reading_since_.begin(), reading_since_.end());
    return oldest == reading_since_.end() ? steady::duration() : now - std::min(now, *oldest);
}

// Also ends if a read hangs, which is then the error.
void loader::wait_until(const std::function<bool()> & is_over) {
    while (!progress_.wait_for(mutex_, std::min<steady::duration>(patience_, std::chrono::seconds(1)), is_over)) {
        if (hangs()) {
            const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(patience_).count();
            fail(status::error("the disk has not answered a read for %lld s: check it, or the network behind it, and "
                               "open the model again",
                               (long long) seconds));
            return;
        }
    }
}

std::chrono::milliseconds loader::oldest_read() const {
    mutex_lock lock(mutex_);
    return std::chrono::duration_cast<std::chrono::milliseconds>(age_of_oldest_read());
}

bool loader::end() {
    mutex_lock lock(mutex_);
    stop();
    wait_until([&]() REQUIRES(mutex_) {
        return std::all_of(reading_since_.begin(), reading_since_.end(),
                           [](steady::time_point since) { return since == steady::time_point::max(); });
    });
    return !hangs();
}

bool loader::settled(const load_state & state) const {
    mutex_lock lock(mutex_);
    return state.arrived == state.requested;
}

bool loader::settle(const load_state & state) {
    mutex_lock lock(mutex_);
    const auto end  = steady::now() + std::chrono::seconds(1);
    const auto done = [&] { return state.arrived == state.requested; };
    wait_until([&] { return done() || steady::now() >= end; });
    return done() || hangs();
}

status loader::error() const {
    mutex_lock lock(mutex_);
    return error_;
}

bool loader::arrived(const load_state & state, part_set parts) const {
    mutex_lock lock(mutex_);
    return state.arrived.has(parts);
}

std::vector<bool> loader::arrived(const load_state * states, size_t n, part_set parts) const {
    mutex_lock        lock(mutex_);
    std::vector<bool> have(n);
    std::transform(states, states + n, have.begin(), [&](const load_state & s) { return s.arrived.has(parts); });
    return have;
}

part_set loader::requested(const load_state & state) const {
    mutex_lock lock(mutex_);
    return state.requested;
}

void loader::reset(load_state & state) {
    mutex_lock lock(mutex_);
    GGML_ASSERT(state.arrived == state.requested);
    state = {};
}

} // namespace hobbit
