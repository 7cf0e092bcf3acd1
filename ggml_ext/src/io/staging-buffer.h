// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"

#include <cstddef>

namespace hobbit {

// Memory of one thread that direct I/O can read into. Growing it loses its content.
class staging_buffer {
  public:
    // `lent`, at a multiple of file_reader::alignment, is used as long as it is large enough.
    explicit staging_buffer(char * lent = nullptr, size_t lent_size = 0) : lent_(lent), size_(lent_size) {}

    bool   reserve(size_t size); // false: no memory left
    char * data() const;         // a multiple of file_reader::alignment

  private:
    char *                  lent_;
    ggml_backend_buffer_ptr memory_; // null: lent_ is used
    size_t                  size_;
};

} // namespace hobbit
