// SPDX-License-Identifier: MIT
#pragma once

#include "base/system-memory.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "io/file-reader.h"

#include <cstddef>
#include <vector>

namespace hobbit {

// The host memory from which experts are copied to these devices. Page-locked (pinned) memory lets a device copy by
// itself, at the speed of its link. It is used if the driver of one device provides it and direct I/O can read into it,
// which is tried with the reader's first file; otherwise a warning says so and ordinary memory is used.
//
// Thread-safety: as ggml's registry. REQUIRES: the reader has a file
ggml_backend_buffer_type_t find_pinned_memory(const std::vector<ggml_backend_dev_t> & devices, file_reader & reader);

// Memory of one thread that direct I/O can read into. Growing it loses its content.
class staging_buffer {
  public:
    // `lent`, at a multiple of file_reader::alignment, is used as long as it is large enough.
    explicit staging_buffer(char * lent = nullptr, size_t lent_size = 0) : lent_(lent), size_(lent_size) {}

    // Returns false if no memory is left.
    bool reserve(size_t size) {
        if (size > size_) {
            memory_.reset(
                ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size + file_reader::alignment));
            size_ = memory_ ? size : 0;
        }
        return size <= size_;
    }

    // A multiple of file_reader::alignment.
    char * data() const { return memory_ ? aligned_base(memory_.get(), file_reader::alignment) : lent_; }

  private:
    char *                  lent_;
    ggml_backend_buffer_ptr memory_; // null: lent_ is used
    size_t                  size_;
};

} // namespace hobbit
