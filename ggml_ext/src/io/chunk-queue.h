// SPDX-License-Identifier: MIT
#pragma once

#include "device/device-traits.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "io/file-reader.h"
#include "model/expert.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace hobbit {

// The parts of one expert that were requested for its slot, and those that have arrived.
// The loader's mutex guards it. It must live until it is settled or the loader ends.
struct load_state {
    part_set requested;
    part_set arrived;
    // parts in flight
    part_set begun;
    part_set failed;

    per_part<uint32_t> n_chunks = {}; // queued or in flight
};

enum class load_urgency { demand, prefetch };

// The destination of a part, or of a piece of it. Without a buffer, the file is read in place: data of a part is a
// multiple of file_reader::alignment with room for aligned_span() bytes, and the part begins at data_offset(). With a
// buffer, which is a device's memory or has a repacked layout, rows are read into staging memory and set as they
// arrive.
struct part_target {
    char *                data;
    ggml_backend_buffer_t buffer = nullptr;
    matrix_shape          shape  = {}; // if there is a buffer
    size_t                zeros  = 0;  // bytes behind the rows to set to zero
};

// A piece of a part, or all of it: its range of the file, and its destination.
struct chunk : part_location {
    load_state * state;
    part_id      part;
    const char * source; // in host memory; null: the file
    part_target  to = {};

    bool is_of(const load_state & s, part_set parts) const { return state == &s && (parts & part); }
};

// Removes the elements that `is_removed` selects, and returns them. Both keep their order.
template <typename Container, typename Predicate>
std::vector<typename Container::value_type> extract_if(Container & from, Predicate is_removed) {
    const auto first = std::stable_partition(from.begin(), from.end(), std::not_fn(is_removed));
    const std::vector<typename Container::value_type> removed(first, from.end());
    from.erase(first, from.end());
    return removed;
}

// The chunks that wait for the disk, or for the link to one device. Demands come first. A prefetch is taken only while
// no demand is queued and fewer than max_prefetches chunks of prefetches are in flight.
//
// Thread-safety: none.
class chunk_queue {
  public:
    explicit chunk_queue(size_t max_prefetches = 1) : max_prefetches_(max_prefetches) {}

    void push(const std::vector<chunk> & chunks, load_urgency urgency) {
        std::deque<chunk> & queue = urgency == load_urgency::demand ? demand_ : prefetch_;
        queue.insert(queue.end(), chunks.begin(), chunks.end());
    }

    // Takes the next chunk that may begin, and further ones up to max_bytes in all (prefetches of one part only).
    // Returns false if none may begin.
    bool take(size_t max_bytes, std::vector<chunk> & taken) {
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

    // Ends a chunk that was taken. Returns whether it is still a prefetch, not demanded since.
    bool end(const chunk & done) {
        const auto is_alike = [&](const chunk & c) { return c.is_of(*done.state, done.part); };
        const auto found    = std::find_if(prefetching_.begin(), prefetching_.end(), is_alike); // any of them does
        if (found == prefetching_.end()) {
            return false;
        }
        prefetching_.erase(found);
        return true;
    }

    // Turns the prefetches of a part into demands. Returns their number, queued or in flight.
    size_t promote(const load_state & state, part_id part) {
        const std::vector<chunk> queued = drop_prefetches(state, part);
        demand_.insert(demand_.end(), queued.begin(), queued.end());
        return queued.size() + extract_if(prefetching_, [&](const chunk & c) { return c.is_of(state, part); }).size();
    }

    // Removes the queued prefetches of `parts`.
    std::vector<chunk> drop_prefetches(const load_state & state, part_set parts) {
        return extract_if(prefetch_, [&](const chunk & c) { return c.is_of(state, parts); });
    }

    // Removes all queued chunks.
    std::vector<chunk> clear() {
        std::vector<chunk> all(demand_.begin(), demand_.end());
        all.insert(all.end(), prefetch_.begin(), prefetch_.end());
        demand_.clear();
        prefetch_.clear();
        return all;
    }

  private:
    const size_t       max_prefetches_;
    std::deque<chunk>  demand_;
    std::deque<chunk>  prefetch_;
    std::vector<chunk> prefetching_; // in flight, until they arrive or become demands
};

// A part in chunks of `size` bytes that are read in place. They begin at offsets that direct I/O accepts. REQUIRES: the
// destination has no buffer.
inline std::vector<chunk> chunks_in_place(const chunk & whole, size_t size) {
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

// A part in chunks of whole row groups, of about `size` bytes each. REQUIRES: the destination has a buffer.
inline std::vector<chunk> chunks_of_rows(const chunk & whole, size_t size) {
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
