// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "status.h"

#include <cstddef>
#include <cstdint>

namespace hobbit {

// The memory of equal slots for the experts of one tier, in one buffer of a device. Knows no experts.
//
// Thread-safety: none, but different slots' memory may be used at once.
class slot_pool {
  public:
    slot_pool() = default;
    ~slot_pool();

    slot_pool(const slot_pool &)             = delete;
    slot_pool & operator=(const slot_pool &) = delete;

    // Every slot starts at a multiple of file_reader::alignment, of which slot_size is a multiple. `packed`, which may
    // be null, is a layout in host memory (see weight-layout.h) that a part of the weights is kept in. REQUIRES:
    // n_slots > 0, and nobody uses what an earlier call allocated.
    status allocate(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t slot_size,
                    uint32_t n_slots);

    uint32_t n_slots() const { return n_slots_; }
    size_t   slot_size() const { return slot_size_; }

    char * data(uint32_t slot) const { return base_ + size_t(slot) * slot_size_; }

    // Of weights as the file has them, and of packed ones (null without that layout): two views of the same memory.
    ggml_backend_buffer_t buffer() const { return buffer_; }
    ggml_backend_buffer_t packed() const { return packed_; }

  private:
    void free();

    ggml_backend_buffer_t buffer_    = nullptr; // owned, as is packed_
    ggml_backend_buffer_t packed_    = nullptr;
    char *                base_      = nullptr;
    size_t                slot_size_ = 0;
    uint32_t              n_slots_   = 0;
};

} // namespace hobbit
