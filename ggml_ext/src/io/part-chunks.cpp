// SPDX-License-Identifier: MIT
#include "io/part-chunks.h"

#include "device/repacked-layout.h"
#include "ggml.h"
#include "io/file-reader.h"

#include <algorithm>
#include <cstdint>

namespace hobbit {

chunk whole_part(load_state & state, part_id part, const part_location & location, const char * source) {
    return { &state, part, location.file, location.offset, location.size, source, nullptr, nullptr, location.type, {} };
}

std::vector<chunk> chunks_in_place(const chunk & whole, const part_target & target, size_t size) {
    std::vector<chunk> chunks;
    const uint64_t     first = whole.offset - data_offset(whole.location());
    const uint64_t     end   = whole.offset + whole.size;
    for (uint64_t at = first; at < end; at += size) {
        chunk c  = whole;
        c.offset = std::max(at, whole.offset);
        c.size   = size_t(std::min(at + size, end) - c.offset);
        c.dst    = target.data + (at - first);
        chunks.push_back(c);
    }
    return chunks;
}

std::vector<chunk> chunks_of_rows(const chunk & whole, const part_target & target, size_t size) {
    std::vector<chunk> chunks;
    const size_t       row_size = ggml_row_size(whole.type, target.shape.n_in);
    const int64_t      n_rows   = rows_per_chunk(size, row_size);
    for (int64_t row = 0; row < target.shape.n_out; row += n_rows) {
        const size_t at = size_t(row) * row_size;
        chunk        c  = whole;
        c.buffer        = target.buffer;
        c.rows          = { target.shape.n_in, std::min(n_rows, target.shape.n_out - row) };
        c.offset        = whole.offset + at;
        c.size          = size_t(c.rows.n_out) * row_size;
        c.source        = whole.source ? whole.source + at : nullptr;
        c.dst           = target.data + at;
        chunks.push_back(c);
    }
    chunks.back().zeros = target.zeros;
    return chunks;
}

} // namespace hobbit
