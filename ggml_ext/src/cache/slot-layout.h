// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "model/expert-index.h"
#include "model/expert-shapes.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// How the experts of one tier lie in the memory of a pool. In host memory slots are contiguous, and the file's bytes
// are read in place. In a device's memory the matrices of a part are contiguous, as in llama.cpp's own tensors, so that
// one operation multiplies by all of them.
//
// Thread-safety: none; constant once the banks are planned.
class slot_layout {
  public:
    // The place of a part in a bank of slots.
    struct part_place {
        size_t offset = 0; // offset of the first slot's matrix
        size_t stride = 0; // bytes from slot to slot
        size_t zeros  = 0; // zero bytes behind every matrix
    };

    // All banks have the same size; the last one may be used partly.
    struct bank_plan {
        uint32_t n_slots        = 0;
        uint32_t slots_per_bank = 0;
        size_t   bank_size      = 0;
    };

    slot_layout() = default; // holds no tier

    // `memory` is what the device computes in.
    slot_layout(const expert_index & index, tier_id tier, ggml_backend_dev_t device, ggml_backend_buffer_type_t memory);

    bool                       in_host() const { return in_host_; }
    ggml_backend_buffer_type_t memory() const { return memory_; }

    // Bytes of an expert's slot, and bytes of a device's memory that a pool takes beside its slots.
    size_t slot_size() const { return slot_size_; }
    size_t overhead() const;

    const part_place & place(layer_id layer, part_id part) const { return places_[layer][part]; }

    // A bank gets as many slots as one buffer holds and one operation of the device accepts. The plan has fewer than
    // n_slots if these would take more memory than n_slots * slot_size() + overhead(). place() depends on the plan.
    status plan_banks(uint32_t n_slots, bank_plan & plan);

  private:
    void   lay_out_slots(const expert_index & index);
    void   lay_out_stacks();
    size_t place_stacks(uint32_t n_slots);
    status fit_bank(uint32_t & slots_per_bank);
    bool   is_multiplied(const expert_matrix & kind, uint32_t n_slots) const;

    tier_id                    tier_    = tier_id::high;
    ggml_backend_dev_t         device_  = nullptr;
    ggml_backend_buffer_type_t memory_  = nullptr;
    bool                       in_host_ = false;

    size_t                            slot_size_ = 0;
    std::vector<per_part<part_place>> places_;       // [layer][part]
    std::vector<expert_matrix>        matrices_;     // distinct, of a device's pool
    per_part<size_t>                  padding_ = {}; // bytes behind the last matrix of a part
};

} // namespace hobbit
