// SPDX-License-Identifier: MIT
#include "io/embedding-reader.h"

#include "ggml-backend.h"

#include <cstring>

namespace hobbit {

status embedding_reader::read(int32_t row, float * out) {
    if (row < 0 || row >= shape_.n_out) {
        return status::error("token %d is not in the vocabulary of %lld tokens", row, (long long) shape_.n_out);
    }
    const size_t        row_size = ggml_row_size(table_.type, shape_.n_in);
    const part_location place    = { table_.file, table_.offset + size_t(row) * row_size, row_size, table_.type };
    const size_t        offset   = data_offset(place);
    const size_t        span     = aligned_span(place);
    if (!staging_.reserve(span)) {
        return status::error("no memory is left for %zu bytes of the token embedding", span);
    }
    reads_.submit(state_, part_id::up, place, { staging_.data() }, load_urgency::demand);
    HOBBIT_TRY(reads_.wait(state_, part_id::up));
    reads_.reset(state_);
    const char * data = staging_.data() + offset;
    if (table_.type == GGML_TYPE_F32) {
        std::memcpy(out, data, row_size);
    } else {
        ggml_get_type_traits(table_.type)->to_float(data, out, shape_.n_in);
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
    for (size_t i = 0; i < numbers.size(); i++) {
        HOBBIT_TRY(read(numbers[i], converted_.data()));
        ggml_backend_tensor_set(lookup, converted_.data(), i * lookup->nb[1], shape_.n_in * sizeof(float));
    }
    return {};
}

} // namespace hobbit
