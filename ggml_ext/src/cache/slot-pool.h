// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// The memory of the slots for the experts of one tier, on one device, in banks of equal numbers of slots: as many as
// one buffer of the device holds. Knows no experts, and not how they lie in a bank.
//
// Thread-safety: none, but different slots' memory may be used at once.
class slot_pool {
  public:
    slot_pool() = default;
    ~slot_pool();

    slot_pool(const slot_pool &)             = delete;
    slot_pool & operator=(const slot_pool &) = delete;

    // Every bank starts at a multiple of file_reader::alignment. `packed`, which may be null, is a layout in host
    // memory (see repacked-layout.h) that a part of the weights is kept in. An error asks for a smaller one of
    // `options`. REQUIRES: n_slots > 0, and nobody uses what an earlier call allocated.
    status allocate(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t bank_size,
                    uint32_t slots_per_bank, uint32_t n_slots, const char * options);

    uint32_t n_slots() const { return n_slots_; }
    uint32_t slots_per_bank() const { return slots_per_bank_; }

    // The bank that holds the slot.
    char * bank(uint32_t slot) const { return bank_of(slot).base; }

    // Of weights as the file has them, and of packed ones (null without that layout): two views of the same memory.
    ggml_backend_buffer_t buffer(uint32_t slot) const { return bank_of(slot).buffer; }
    ggml_backend_buffer_t packed(uint32_t slot) const { return bank_of(slot).packed; }

  private:
    struct memory_bank {
        ggml_backend_buffer_t buffer = nullptr; // owned, as is packed
        ggml_backend_buffer_t packed = nullptr;
        char *                base   = nullptr;
    };

    const memory_bank & bank_of(uint32_t slot) const { return banks_[slot / slots_per_bank_]; }

    static bool allocate_bank(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t size,
                              memory_bank & bank);
    void        free();

    std::vector<memory_bank> banks_;
    uint32_t                 slots_per_bank_ = 1;
    uint32_t                 n_slots_        = 0;
};

} // namespace hobbit
