// SPDX-License-Identifier: MIT
#include "io/staging-buffer.h"

#include "base/system-memory.h"
#include "ggml-backend.h"
#include "io/file-reader.h"

namespace hobbit {

bool staging_buffer::reserve(size_t size) {
    if (size <= size_) {
        return true;
    }
    memory_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size + file_reader::alignment));
    size_ = memory_ ? size : 0;
    return memory_ != nullptr;
}

char * staging_buffer::data() const {
    return memory_ ? aligned_base(memory_.get(), file_reader::alignment) : lent_;
}

} // namespace hobbit
