// SPDX-License-Identifier: MIT
#include "slot-pool.h"

#include "file-reader.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <sys/mman.h>

namespace hobbit {

slot_pool::~slot_pool() {
    free();
}

void slot_pool::free() {
    ggml_backend_buffer_free(buffer_);
    ggml_backend_buffer_free(packed_);
    buffer_ = packed_ = nullptr;
    n_slots_          = 0;
}

// Slots are filled in any order: in small pages, their memory would be scattered, and reading it slow.
static void ask_for_huge_pages(ggml_backend_buffer_type_t buft, char * base, size_t size) {
#ifdef MADV_HUGEPAGE
    if (ggml_backend_buft_is_host(buft)) {
        madvise(base, size, MADV_HUGEPAGE); // a system that has none goes without
    }
#endif
}

status slot_pool::allocate(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t slot_size,
                           uint32_t n_slots) {
    GGML_ASSERT(n_slots > 0 && slot_size % file_reader::alignment == 0);
    free();

    const size_t          size  = slot_size * n_slots;
    ggml_backend_buffer_t owner = ggml_backend_buft_alloc_buffer(packed ? packed : buft, size + file_reader::alignment);
    (packed ? packed_ : buffer_) = owner;
    if (!owner) {
        return status::error(format("cannot allocate %s for expert pools on %s: give a smaller --pools or --memory",
                                    format_size(double(size)).c_str(), ggml_backend_buft_name(buft)));
    }
    base_  = static_cast<char *>(ggml_backend_buffer_get_base(owner));
    base_ += (file_reader::alignment - uintptr_t(base_) % file_reader::alignment) % file_reader::alignment;
    ask_for_huge_pages(buft, base_, size);
    if (packed) {
        buffer_ = ggml_backend_cpu_buffer_from_ptr(base_, size);
    }
    slot_size_ = slot_size;
    n_slots_   = n_slots;
    return {};
}

} // namespace hobbit
