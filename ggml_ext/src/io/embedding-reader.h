// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "ggml.h"
#include "io/file-reader.h"
#include "io/loader.h"
#include "io/staging-buffer.h"
#include "model/expert-index.h"

#include <array>
#include <chrono>
#include <vector>

namespace hobbit {

// Reads rows of the token embedding from disk, one per token, several at once. The matrix is never loaded as a whole. A
// loader of its own reads, so that a read that does not return is an error here too, and the counters are those of
// experts alone.
//
// Thread-safety: none.
class embedding_reader {
  public:
    // Reads in flight; their staging memory fills one huge page.
    static constexpr uint32_t n_threads = 4;

    // The reader must outlive this one. `patience` is the time in which a read must return.
    embedding_reader(file_reader & reader, const embedding_table & table,
                     std::chrono::milliseconds patience = std::chrono::minutes(1)) :
        table_(table.location),
        shape_(table.shape),
        reads_(reader, counters_, n_threads, {}, ggml_backend_cpu_buffer_type(), patience) {}

    // Computes a GET_ROWS over the matrix as ggml does, with rows converted to float.
    status compute(ggml_tensor * lookup);

    // See loader.
    std::chrono::milliseconds oldest_read() const { return reads_.oldest_read(); }
    bool                      end() { return reads_.end(); }

  private:
    // Rows that are read together.
    static constexpr size_t window = 64;

    part_location place(int32_t row) const;
    status        read(const std::vector<int32_t> & rows, size_t first, ggml_tensor * lookup);

    const part_location            table_;
    const matrix_shape             shape_;   // n_out rows of n_in
    staging_buffer                 staging_; // allocated once: after an error, a read may still write into it
    std::array<load_state, window> states_;
    std::vector<float>             converted_; // a row
    stats                          counters_;
    loader                         reads_;
};

} // namespace hobbit
