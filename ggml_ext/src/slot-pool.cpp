// SPDX-License-Identifier: MIT
#include "slot-pool.h"

#include "file-reader.h"
#include "ggml.h"

#include <sys/mman.h>

namespace hobbit {

slot_pool::~slot_pool() {
    ggml_backend_buffer_free(buffer_);
}

status slot_pool::allocate(ggml_backend_buffer_type_t buft, size_t slot_size, uint32_t n_slots) {
    GGML_ASSERT(n_slots > 0 && slot_size % file_reader::alignment == 0);
    ggml_backend_buffer_free(buffer_);
    n_slots_ = 0;

    const size_t size = slot_size * n_slots;
    buffer_           = ggml_backend_buft_alloc_buffer(buft, size + file_reader::alignment);
    if (!buffer_) {
        return status::error(format("cannot allocate %s for expert pools on %s: give a smaller --pools or --memory",
                                    format_size(double(size)).c_str(), ggml_backend_buft_name(buft)));
    }
    base_       = static_cast<char *>(ggml_backend_buffer_get_base(buffer_));
    base_      += (file_reader::alignment - uintptr_t(base_) % file_reader::alignment) % file_reader::alignment;
    slot_size_  = slot_size;
    madvise(base_, size, MADV_HUGEPAGE);
    n_slots_    = n_slots;
    return {};
}

} // namespace hobbit
