// SPDX-License-Identifier: MIT
#include "io/embedding-reader.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>

namespace hobbit {

part_location embedding_reader::place(int32_t row) const {
    const size_t row_size = ggml_row_size(table_.type, shape_.n_in);
    return { table_.file, table_.offset + size_t(row) * row_size, row_size, table_.type };
}

// Reads a window of rows, and converts each as it arrives.
status embedding_reader::read(const std::vector<int32_t> & rows, size_t first, ggml_tensor * lookup) {
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
        ggml_backend_tensor_set(lookup, converted_.data(), (first + i) * lookup->nb[1], shape_.n_in * sizeof(float));
    }
    return {};
}

status embedding_reader::compute(ggml_tensor * lookup) {
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

} // namespace hobbit
