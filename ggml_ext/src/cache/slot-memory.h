// SPDX-License-Identifier: MIT
#pragma once

#include "base/page-commit.h"
#include "base/status.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "io/chunk-queue.h"
#include "model/expert-index.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Type and shape of one matrix of an expert's tier.
struct expert_matrix {
    part_id      part;
    ggml_type    type;
    matrix_shape shape;

    bool operator==(const expert_matrix & o) const {
        return part == o.part && type == o.type && shape.n_in == o.shape.n_in && shape.n_out == o.shape.n_out;
    }
};

// How one tier's experts of some layers lie in the memory of a pool. For the CPU slots are contiguous. For a device the
// matrices of a part are, as in llama.cpp's own tensors, so that one operation multiplies by all of them. In host
// memory, which an integrated GPU may share, the file's bytes are read in place.
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

    // `memory` is what the device computes in.
    slot_layout(const expert_index & index, tier_id tier, const std::vector<layer_id> & layers,
                ggml_backend_dev_t device, ggml_backend_buffer_type_t memory);

    bool                       in_host() const { return in_host_; }
    ggml_backend_buffer_type_t memory() const { return memory_; }

    // Bytes of an expert's slot, and bytes of a device's memory that a pool takes beside its slots.
    size_t slot_size() const { return slot_size_; }
    size_t overhead() const;

    const part_place & place(layer_id layer, part_id part) const { return places_[layer][part]; }

    // A bank gets as many slots as one buffer holds and one operation of the device accepts. The plan has fewer than
    // n_slots if these would take more memory than n_slots * slot_size() + overhead(). place() depends on the plan.
    status plan_banks(uint32_t n_slots, bank_plan & plan);

  protected:
    const tier_id            tier_;
    const ggml_backend_dev_t device_;

  private:
    void   lay_out_slots(const expert_index & index, const std::vector<layer_id> & layers);
    void   lay_out_stacks(const expert_index & index, const std::vector<layer_id> & layers);
    size_t place_stacks(uint32_t n_slots);
    status fit_bank(uint32_t & slots_per_bank);

    ggml_backend_buffer_type_t memory_;
    bool                       in_host_;
    bool                       is_stacked_; // the matrices of a part are contiguous

    size_t                            slot_size_ = 0;
    std::vector<per_part<part_place>> places_;       // [layer][part]
    std::vector<expert_matrix>        matrices_;     // distinct, of a device's pool
    per_part<size_t>                  padding_ = {}; // bytes behind the last matrix of a part
};

// The memory of a layout's slots. It consists of banks with equal numbers of slots; a bank is one buffer of the device.
// Pages in host memory are taken in the background. Does not know which expert has which slot.
//
// Thread-safety: none, but the memory of different slots may be used at the same time.
class slot_memory : public slot_layout {
  public:
    // Plans slots for the tier's experts of the layers. The device computes in `memory`. With `pack` weights are kept
    // in the CPU's own layouts, if it has any. The index must outlive the object.
    slot_memory(const expert_index & index, tier_id tier, const std::vector<layer_id> & layers,
                ggml_backend_dev_t device, ggml_backend_buffer_type_t memory, bool pack) :
        slot_layout(index, tier, layers, device, memory), index_(index), pack_(pack) {}

    size_t bytes() const { return n_slots() * slot_size(); } // bytes of all slots

    // Lessens the number to that of the slots that allocate() would have.
    status fit(uint32_t & n_slots) const;

    // Allocates n_slots slots, or fewer if that many would exceed n_slots * slot_size() + overhead() on a device.
    // `spare`: see page_commit. REQUIRES: n_slots > 0, and nobody uses memory of an earlier call.
    status allocate(uint32_t n_slots, uint64_t spare = 0);

    uint32_t n_slots() const { return banks_.n_slots; }

    // The address of the expert's matrix. Its type is that of the index, its layout that of buffer()'s type. In a
    // buffer the matrices of a part are evenly spaced: number n lies n * stride() bytes behind number 0.
    char *                data(uint32_t slot, expert_id id, part_id part) const;
    ggml_backend_buffer_t buffer(uint32_t slot, expert_id id, part_id part) const;
    size_t                stride(layer_id layer, part_id part) const { return place(layer, part).stride; }
    uint32_t              number(uint32_t slot) const { return slot % n_numbers(); }
    uint32_t              n_numbers() const { return banks_.slots_per_bank; }

    // The place at which the loader puts the matrix.
    part_target target(uint32_t slot, expert_id id, part_id part) const;

  private:
    // Two views of the same memory, which begins at a multiple of file_reader::alignment.
    struct memory_bank {
        ggml_backend_buffer_ptr packed; // for weights of another buffer type; null: there are none
        ggml_backend_buffer_ptr buffer; // freed first: it may be a view of `packed`
        char *                  base = nullptr;
    };

    const memory_bank & bank_of(uint32_t slot) const { return buffers_[slot / banks_.slots_per_bank]; }

    bool is_packed(expert_id id, part_id part) const { return packed_parts_[id].has(part); }

    // Returns true if the loader writes the matrix by ggml's functions instead of reading into the slot.
    bool is_set(expert_id id, part_id part) const { return !in_host() || (is_packed(id, part) && repacks_); }

    char *                     address(uint32_t slot, layer_id layer, part_id part) const;
    ggml_backend_buffer_type_t choose_packed();
    bool                       allocate_bank(ggml_backend_buffer_type_t packed, size_t size);
    void                       commit_pages(uint64_t spare);
    void                       free();

    const expert_index &   index_;
    const bool             pack_;
    bool                   repacks_ = false; // packed parts have another layout than in the file
    expert_table<part_set> packed_parts_;

    slot_layout::bank_plan   banks_;
    std::vector<memory_bank> buffers_; // [bank]
    page_commit              commit_;  // commits the pages of banks in host memory, and is destroyed before them
};

} // namespace hobbit
