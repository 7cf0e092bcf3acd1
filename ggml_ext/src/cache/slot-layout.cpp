// SPDX-License-Identifier: MIT
#include "cache/slot-layout.h"

#include "device/device-traits.h"
#include "device/repacked-layout.h"
#include "ggml-cpp.h"
#include "io/file-reader.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace hobbit {

slot_layout::slot_layout(const expert_index & index, tier_id tier, ggml_backend_dev_t device,
                         ggml_backend_buffer_type_t memory) :
    tier_(tier), device_(device), memory_(memory), in_host_(is_host_device(device)), places_(index.n_layers()) {
    if (in_host_) {
        lay_out_slots(index);
    } else {
        matrices_ = distinct_matrices(index, tier);
        lay_out_stacks();
    }
}

//
// slots
//

// Types differ between layers and parts, and experts begin at any offset in their file: a part's place in the slot has
// room for the widest aligned span of its layer, and a slot for the widest layer.
void slot_layout::lay_out_slots(const expert_index & index) {
    std::vector<per_part<size_t>> spans(index.n_layers(), per_part<size_t>{});
    index.each_matrix(tier_, [&](expert_id id, part_id part, const part_location & at) {
        spans[id.layer][part] = std::max(spans[id.layer][part], aligned_span(at));
    });
    for (const auto & span : spans) {
        slot_size_ = std::max(slot_size_, std::accumulate(span.begin(), span.end(), size_t(0)));
    }
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        size_t end = 0;
        for (const part_id part : part_set::all()) {
            places_[layer][part]  = { end, slot_size_, 0 };
            end                  += spans[layer][part];
        }
    }
}

//
// stacks
//

// Bytes that a device may read behind a tensor of the weights.
static size_t padding_of(ggml_backend_buffer_type_t buft, const expert_matrix & kind) {
    const ggml_context_ptr ctx(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    const ggml_tensor *    tensor = ggml_new_tensor_2d(ctx.get(), kind.type, kind.shape.n_in, kind.shape.n_out);
    return ggml_backend_buft_get_alloc_size(buft, tensor) - ggml_nbytes(tensor);
}

// The bytes that a matrix's address is a multiple of: a block, or one load of a type without blocks.
static size_t unit_of(const expert_matrix & kind, const device_traits & traits) {
    return ggml_row_size(kind.type, std::max<int64_t>(ggml_blck_size(kind.type), traits.load_width));
}

// Where types differ, the stride is a multiple of all their units. Kernels that read past a matrix would interpret the
// next one's bytes as their own type, possibly as NaN, so zeros follow every matrix.
void slot_layout::lay_out_stacks() {
    struct stack {
        size_t              widest  = 0;
        size_t              unit    = 1;
        size_t              padding = 0;
        std::set<ggml_type> types;
    };

    per_part<stack> stacks;

    const device_traits & traits = traits_of(device_);
    for (const expert_matrix & kind : matrices_) {
        auto & part  = stacks[kind.part];
        part.widest  = std::max(part.widest, kind.bytes());
        part.unit    = std::lcm(part.unit, unit_of(kind, traits));
        part.padding = std::max(part.padding, padding_of(memory_, kind));
        part.types.insert(kind.type);
    }
    for (const part_id i : part_set::all()) {
        const auto & part    = stacks[i];
        const size_t zeros   = traits.reads_past_end && part.types.size() > 1 ? part.padding : 0;
        padding_[i]          = part.padding;
        const size_t stride  = (part.widest + zeros + part.unit - 1) / part.unit * part.unit;
        slot_size_          += stride;
        for (auto & places : places_) {
            places[i] = { 0, stride, zeros };
        }
    }
}

// Gives each part's stack its place in a bank of so many slots. Returns the size of the bank.
size_t slot_layout::place_stacks(uint32_t n_slots) {
    size_t end = 0;
    for (const part_id part : part_set::all()) {
        for (auto & places : places_) {
            places[part].offset = end;
        }
        end += places_.front()[part].stride * n_slots + padding_[part];
        end  = GGML_PAD(end, file_reader::alignment); // more than any device asks for
    }
    return end;
}

// Counts one bank. Only large pools have more, and they give up a slot for theirs.
size_t slot_layout::overhead() const {
    if (in_host_) {
        return 0;
    }
    return std::accumulate(padding_.begin(), padding_.end(), (1 + padding_.size()) * file_reader::alignment);
}

//
// banks
//

bool slot_layout::is_multiplied(const expert_matrix & kind, uint32_t n_slots) const {
    return multiplies_experts(device_, memory_, kind.type, kind.shape, places_.front()[kind.part].stride, n_slots);
}

// The number of matrices whose blocks a kernel can count.
static uint64_t most_counted(const expert_matrix & kind, size_t stride, const device_traits & traits) {
    return traits.counts_in_32_bits ? uint64_t(INT32_MAX) * ggml_type_size(kind.type) / stride : UINT64_MAX;
}

// As many slots as one buffer of the device holds and one of its operations takes.
status slot_layout::fit_bank(uint32_t & slots_per_bank) {
    for (const expert_matrix & kind : matrices_) {
        const uint64_t most = most_counted(kind, places_.front()[kind.part].stride, traits_of(device_));
        slots_per_bank      = uint32_t(std::clamp<uint64_t>(most, 1, slots_per_bank));
    }
    const size_t room = ggml_backend_buft_get_max_size(memory_) - file_reader::alignment;
    while (true) {
        const auto fits = [&](const expert_matrix & kind) { return is_multiplied(kind, slots_per_bank); };
        const auto bad  = std::find_if_not(matrices_.begin(), matrices_.end(), fits);
        if (place_stacks(slots_per_bank) <= room && bad == matrices_.end()) {
            return {};
        }
        if (slots_per_bank == 1) {
            return status::error("%s cannot multiply by the %s-precision experts (%s): choose another device",
                                 ggml_backend_dev_name(device_), tier_name(tier_),
                                 bad == matrices_.end() ? "too large" : ggml_type_name(bad->type));
        }
        slots_per_bank = (slots_per_bank + 1) / 2;
    }
}

status slot_layout::plan_banks(uint32_t n_slots, bank_plan & plan) {
    uint32_t   most    = n_slots;
    const auto n_banks = [&] { return (n_slots + most - 1) / most; };
    if (in_host_) {
        const size_t room   = ggml_backend_buft_get_max_size(memory_) - file_reader::alignment;
        most                = uint32_t(std::clamp<size_t>(room / slot_size_, 1, n_slots));
        plan.slots_per_bank = n_slots / n_banks();
        plan.n_slots        = plan.slots_per_bank * n_banks();
        plan.bank_size      = slot_size_ * plan.slots_per_bank;
        return {};
    }
    HOBBIT_TRY(fit_bank(most));
    const size_t bound = slot_size_ * n_slots + overhead();
    for (;; n_slots--) { // one slot is always within the bound
        const uint32_t slots_per_bank = (n_slots + n_banks() - 1) / n_banks();
        plan                          = { n_slots, slots_per_bank, place_stacks(slots_per_bank) };
        if (n_banks() * (plan.bank_size + file_reader::alignment) <= bound) {
            return {};
        }
    }
}

} // namespace hobbit
