// SPDX-License-Identifier: MIT
#include "io/chunk-queue.h"

#include "device/device-traits.h"
#include "ggml.h"
#include "io/file-reader.h"

namespace hobbit {

void chunk_queue::push(const std::vector<chunk> & chunks, load_urgency urgency) {
    std::deque<chunk> & queue = urgency == load_urgency::demand ? demand_ : prefetch_;
    queue.insert(queue.end(), chunks.begin(), chunks.end());
}

bool chunk_queue::take(size_t max_bytes, std::vector<chunk> & taken) {
    taken.clear();
    const bool is_demand = !demand_.empty();
    if (!is_demand && (prefetch_.empty() || prefetching_.size() >= max_prefetches_)) {
        return false;
    }
    std::deque<chunk> & queue = is_demand ? demand_ : prefetch_;
    size_t              bytes = 0;
    do {
        taken.push_back(queue.front());
        taken.back().state->begun |= taken.back().part;
        bytes                     += taken.back().size;
        queue.pop_front();
    } while (!queue.empty() && bytes + queue.front().size <= max_bytes &&
             (is_demand || queue.front().is_of(*taken.front().state, taken.front().part)));
    if (!is_demand) {
        prefetching_.insert(prefetching_.end(), taken.begin(), taken.end());
    }
    return true;
}

bool chunk_queue::end(const chunk & done) {
    const auto is_alike = [&](const chunk & c) { return c.is_of(*done.state, done.part); };
    const auto found    = std::find_if(prefetching_.begin(), prefetching_.end(), is_alike); // any of them does
    if (found == prefetching_.end()) {
        return false;
    }
    prefetching_.erase(found);
    return true;
}

size_t chunk_queue::promote(const load_state & state, part_id part) {
    const std::vector<chunk> queued = drop_prefetches(state, part);
    demand_.insert(demand_.end(), queued.begin(), queued.end());
    return queued.size() + extract_if(prefetching_, [&](const chunk & c) { return c.is_of(state, part); }).size();
}

std::vector<chunk> chunk_queue::drop_prefetches(const load_state & state, part_set parts) {
    return extract_if(prefetch_, [&](const chunk & c) { return c.is_of(state, parts); });
}

std::vector<chunk> chunk_queue::clear() {
    std::vector<chunk> all(demand_.begin(), demand_.end());
    all.insert(all.end(), prefetch_.begin(), prefetch_.end());
    demand_.clear();
    prefetch_.clear();
    return all;
}

std::vector<chunk> chunks_in_place(const chunk & whole, size_t size) {
    std::vector<chunk> chunks;
    const uint64_t     first = whole.offset - data_offset(whole);
    const uint64_t     end   = whole.offset + whole.size;
    for (uint64_t at = first; at < end; at += size) {
        chunk c     = whole;
        c.offset    = std::max(at, whole.offset);
        c.size      = size_t(std::min(at + size, end) - c.offset);
        c.to.zeros  = at + size < end ? 0 : whole.to.zeros;
        c.to.data  += at - first;
        chunks.push_back(c);
    }
    return chunks;
}

std::vector<chunk> chunks_of_rows(const chunk & whole, size_t size) {
    std::vector<chunk> chunks;
    const size_t       row_size = ggml_row_size(whole.type, whole.to.shape.n_in);
    const int64_t      n_rows   = rows_per_chunk(size, row_size);
    for (int64_t row = 0; row < whole.to.shape.n_out; row += n_rows) {
        const size_t at   = size_t(row) * row_size;
        chunk        c    = whole;
        c.to.shape.n_out  = std::min(n_rows, whole.to.shape.n_out - row);
        c.to.data        += at;
        c.to.zeros        = 0;
        c.offset         += at;
        c.size            = size_t(c.to.shape.n_out) * row_size;
        c.source          = whole.source ? whole.source + at : nullptr;
        chunks.push_back(c);
    }
    chunks.back().to.zeros = whole.to.zeros;
    return chunks;
}

} // namespace hobbit
