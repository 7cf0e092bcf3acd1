// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml.h"
#include "io/file-reader.h"
#include "io/loader.h"
#include "model/expert-index.h"

#include <vector>

namespace hobbit {

// Reads rows of the token embedding from disk, one per token. The matrix is never loaded as a whole.
//
// Thread-safety: none.
class embedding_reader {
  public:
    // The reader must outlive this one.
    embedding_reader(file_reader & reader, const embedding_table & table) :
        reader_(reader), table_(table.location), shape_(table.shape) {}

    // Computes a GET_ROWS over the matrix as ggml does, with rows converted to float.
    status compute(ggml_tensor * lookup);

  private:
    status read(int32_t row, float * out);

    file_reader &       reader_;
    const part_location table_;
    const matrix_shape  shape_; // n_out rows of n_in
    staging_buffer      staging_;
    std::vector<float>  converted_; // a row
};

} // namespace hobbit
