// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "model/expert-index.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace hobbit {

// Which parts of one expert in one slot were asked for and which have arrived (arrived is a subset).
// Guarded by the mutex of the loader that serves it; must live until it is settled or the loader ends.
struct load_state {
    part_set requested;
    part_set arrived;
    // of parts on the way
    part_set begun;
    part_set failed;

    per_part<uint32_t> n_chunks = {}; // queued or in flight
};

enum class load_urgency { demand, prefetch };

// A piece of a part: bytes of the file, and where they go.
struct chunk {
    load_state *          state;
    part_id               part;
    uint32_t              file;
    uint64_t              offset;
    size_t                size;
    const char *          source; // in host memory; null: the file
    char *                dst;
    ggml_backend_buffer_t buffer; // null: read straight to dst
    ggml_type             type;
    matrix_shape          rows;      // where there is a buffer
    size_t                zeros = 0; // behind them

    part_location location() const { return { file, offset, size, type }; }

    bool is_of(const load_state & s, part_set parts) const { return state == &s && (parts & part); }
};

// The chunks that wait for one way into memory: the disk, or the link to a device. Demands come first. Prefetches are
// taken only while no demand is queued or in flight, nor another prefetch.
//
// Thread-safety: none.
class chunk_queue {
  public:
    void push(const std::vector<chunk> & chunks, load_urgency urgency);

    // Takes what may begin: one, and as many as follow within so many bytes, prefetches of one part. False: none may.
    bool take(size_t max_bytes, std::vector<chunk> & taken);

    // Of one that was taken. Returns whether it was prefetched, and not demanded since.
    bool end(const chunk & done);

    // Turns the prefetches of a part into demands. Returns how many there were, queued or in flight.
    size_t promote(const load_state & state, part_id part);

    // Takes out prefetches of `parts` that are queued.
    std::vector<chunk> drop_prefetches(const load_state & state, part_set parts);

    // Takes out all that is queued.
    std::vector<chunk> clear();

    // Queued or in flight.
    size_t n_demands() const { return n_demands_; }

  private:
    std::deque<chunk>  demand_;
    std::deque<chunk>  prefetch_;
    std::vector<chunk> prefetching_;   // in flight, of one part, until they arrive or become demands
    size_t             n_demands_ = 0; // queued or in flight
};

} // namespace hobbit
