// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "io/file-reader.h"
#include "io/loader.h"
#include "model/expert-index.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
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
    status compute(ggml_tensor * lookup) {
        const ggml_tensor * rows = lookup->src[1];
        GGML_ASSERT(rows->type == GGML_TYPE_I32 && ggml_is_contiguous(rows) && lookup->type == GGML_TYPE_F32);
        GGML_ASSERT(ggml_is_contiguous(lookup) && ggml_nrows(lookup) == ggml_nelements(rows));

        std::vector<int32_t> numbers(ggml_nelements(rows));
        ggml_backend_tensor_get(rows, numbers.data(), 0, ggml_nbytes(rows));
        converted_.resize(shape_.n_in);
        for (const int32_t row : numbers) {
            if (row < 0 || row >= shape_.n_out) {
                return status::error("token %d is not in the vocabulary of %lld tokens", row, (long long) shape_.n_out);
            }
        }
        for (size_t first = 0; first < numbers.size(); first += window) {
            HOBBIT_TRY(read(numbers, first, lookup));
        }
        return {};
    }

    // See loader.
    std::chrono::milliseconds oldest_read() const { return reads_.oldest_read(); }
    bool                      end() { return reads_.end(); }

  private:
    // Rows that are read together.
    static constexpr size_t window = 64;

    part_location place(int32_t row) const {
        const size_t row_size = ggml_row_size(table_.type, shape_.n_in);
        return { table_.file, table_.offset + size_t(row) * row_size, row_size, table_.type };
    }

    // Reads a window of rows, and converts each as it arrives.
    status read(const std::vector<int32_t> & rows, size_t first, ggml_tensor * lookup) {
        const size_t row_size = ggml_row_size(table_.type, shape_.n_in);
        const size_t span     = GGML_PAD(row_size + file_reader::alignment, file_reader::alignment); // the largest
        const size_t n        = std::min(window, rows.size() - first);
        if (!staging_.reserve(window * span)) {
            return status::error("no memory is left for %zu bytes of the token embedding", window * span);
        }
        for (size_t i = 0; i < n; i++) {
            reads_.submit(states_[i], part_id::up, place(rows[first + i]), { staging_.data() + i * span },
                          load_urgency::demand);
        }
        for (size_t i = 0; i < n; i++) {
            HOBBIT_TRY(reads_.wait(states_[i], part_id::up));
            reads_.reset(states_[i]);
            const char * data = staging_.data() + i * span + data_offset(place(rows[first + i]));
            if (table_.type == GGML_TYPE_F32) {
                std::memcpy(converted_.data(), data, row_size);
            } else {
                ggml_get_type_traits(table_.type)->to_float(data, converted_.data(), shape_.n_in);
            }
            ggml_backend_tensor_set(lookup, converted_.data(), (first + i) * lookup->nb[1],
                                    shape_.n_in * sizeof(float));
        }
        return {};
    }

    const part_location            table_;
    const matrix_shape             shape_;   // n_out rows of n_in
    staging_buffer                 staging_; // allocated once: after an error, a read may still write into it
    std::array<load_state, window> states_;
    std::vector<float>             converted_; // a row
    stats                          counters_;
    loader                         reads_;
};

} // namespace hobbit
