// SPDX-License-Identifier: MIT
#pragma once

#include "base/page-commit.h"
#include "base/status.h"
#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// The memory of one tier's slots on one device. It consists of banks with equal numbers of slots; a bank is one buffer
// cache of the device. The pool knows neither experts nor the layout of a bank. Pages in host memory are taken in the
// background.
//
// Thread-safety: none, but different slots' memory may be used at once.
class slot_pool {
  public:
    // Every bank starts at a multiple of file_reader::alignment. `packed` may be null; it is a host layout for a part
    // of the weights (repacked-layout.h). If memory is short, the error asks the user to lower one of `options`.
    // REQUIRES: n_slots > 0, and nobody uses memory of an earlier call.
    // `spare`: of the system's memory, for has_memory; 0: the pool takes all of its size.
    status allocate(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t bank_size,
                    uint32_t slots_per_bank, uint32_t n_slots, const char * options, uint64_t spare = 0);

    // Returns true if a slot that nobody has used yet may be used: its pages are taken, or the system has them and
    // spare ones.
    bool has_memory(uint32_t slot);

    uint32_t n_slots() const { return n_slots_; }
    uint32_t slots_per_bank() const { return slots_per_bank_; }

    // The bank that holds the slot.
    char * bank(uint32_t slot) const { return bank_of(slot).base; }

    // Two views of the same memory: for weights in the file's layout, and for repacked ones (null without a layout).
    ggml_backend_buffer_t buffer(uint32_t slot) const { return bank_of(slot).buffer.get(); }
    ggml_backend_buffer_t packed(uint32_t slot) const { return bank_of(slot).packed.get(); }

  private:
    struct memory_bank {
        ggml_backend_buffer_ptr packed;
        ggml_backend_buffer_ptr buffer; // freed first: it may be a view of `packed`
        char *                  base = nullptr;
    };

    const memory_bank & bank_of(uint32_t slot) const { return banks_[slot / slots_per_bank_]; }

    static bool allocate_bank(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t size,
                              memory_bank & bank);
    void        free();

    std::vector<memory_bank> banks_;
    uint32_t                 slots_per_bank_ = 1;
    uint32_t                 n_slots_        = 0;
    size_t                   slot_size_      = 0;
    uint64_t                 spare_          = 0;
    uint64_t                 n_unseen_       = 0; // bytes of slots used since has_memory looked
    page_commit              commit_; // commits the pages of banks_ in host memory, and is destroyed before them
};

} // namespace hobbit
