// SPDX-License-Identifier: MIT
#include "cache/slot-memory.h"

#include "base/system-memory.h"
#include "device/device-traits.h"
#include "ggml-impl.h"
#include "io/file-reader.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

namespace hobbit {

slot_layout::slot_layout(const expert_index & index, tier_id tier, const std::vector<layer_id> & layers,
                         ggml_backend_dev_t device, ggml_backend_buffer_type_t memory) :
    tier_(tier),
    device_(device),
    memory_(memory),
    in_host_(ggml_backend_buft_is_host(memory)),
    is_stacked_(!is_host_device(device)),
    places_(index.n_layers()) {
    is_stacked_ ? lay_out_stacks(index, layers) : lay_out_slots(index, layers);
}

//
// slots
//

// Types differ between layers and parts, and experts begin at any offset in their file: a part's place in the slot has
// room for the widest aligned span of its layer, and a slot for the widest layer.
void slot_layout::lay_out_slots(const expert_index & index, const std::vector<layer_id> & layers) {
    std::vector<per_part<size_t>> spans(index.n_layers(), per_part<size_t>{});
    const auto                    measure = [&](expert_id id, part_id part, const part_location & at) {
        spans[id.layer][part] = std::max(spans[id.layer][part], aligned_span(at));
    };
    for (const layer_id layer : layers) {
        index.each_matrix(tier_, measure, layer, layer);
        slot_size_ = std::max(slot_size_, std::accumulate(spans[layer].begin(), spans[layer].end(), size_t(0)));
    }
    for (const layer_id layer : layers) {
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
// next one's bytes, or those that the file has there, as their own type, possibly as NaN, so zeros follow every matrix.
void slot_layout::lay_out_stacks(const expert_index & index, const std::vector<layer_id> & layers) {
    struct stack {
        size_t              widest  = 0;
        size_t              unit    = 1;
        size_t              padding = 0;
        std::set<ggml_type> types;
    };

    per_part<stack> stacks;

    const device_traits & traits  = traits_of(device_);
    const auto            measure = [&](expert_id id, part_id part, const part_location & at) {
        stacks[part].widest      = std::max(stacks[part].widest, in_host_ ? aligned_span(at) : at.size);
        const expert_matrix kind = { part, at.type, index.layer(id.layer).shapes[part] };
        if (std::find(matrices_.begin(), matrices_.end(), kind) == matrices_.end()) {
            matrices_.push_back(kind);
        }
    };
    for (const layer_id layer : layers) {
        index.each_matrix(tier_, measure, layer, layer);
    }
    for (const expert_matrix & kind : matrices_) {
        auto & part  = stacks[kind.part];
        part.unit    = std::lcm(part.unit, unit_of(kind, traits));
        part.padding = std::max(part.padding, padding_of(ggml_backend_dev_buffer_type(device_), kind));
        part.types.insert(kind.type);
    }
    for (const part_id i : part_set::all()) {
        auto &       part     = stacks[i];
        const bool   is_next  = in_host_ || part.types.size() > 1; // bytes of another type may follow
        const size_t zeros    = traits.reads_past_end && is_next ? part.padding : 0;
        part.unit             = in_host_ ? std::lcm(part.unit, file_reader::alignment) : part.unit;
        padding_[i]           = part.padding;
        const size_t stride   = (part.widest + zeros + part.unit - 1) / part.unit * part.unit;
        slot_size_           += stride;
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
    if (!is_stacked_) {
        return 0;
    }
    return std::accumulate(padding_.begin(), padding_.end(), (1 + padding_.size()) * file_reader::alignment);
}

//
// banks
//

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
        const auto fits = [&](const expert_matrix & kind) {
            const size_t stride = places_.front()[kind.part].stride;
            return multiplies_experts(device_, memory_, kind.type, kind.shape, stride, slots_per_bank);
        };
        const auto bad = std::find_if_not(matrices_.begin(), matrices_.end(), fits);
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
    if (!is_stacked_) {
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

// All packed parts have the same layout: the first one that the device has for any part.
ggml_backend_buffer_type_t slot_memory::choose_packed() {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_                     = { index_.n_layers(), index_.n_experts() };
    if (!pack_) {
        return nullptr;
    }
    using kind = std::tuple<layer_id, part_id, ggml_type>;
    std::map<kind, bool> are_packed;
    index_.each_matrix(tier_, [&](expert_id id, part_id part, const part_location & at) {
        const auto [known, is_new] = are_packed.try_emplace({ id.layer, part, at.type });
        if (is_new) {
            const layer_shape & shape  = index_.layer(id.layer);
            const auto          layout = packed_layout(device_, at.type, shape.shapes[part], shape.n_experts);
            chosen                     = chosen ? chosen : layout;
            known->second              = layout && layout == chosen;
        }
        packed_parts_[id] |= known->second ? part_set(part) : part_set();
    });
    repacks_ = chosen && !ggml_backend_buft_is_host(chosen);
    return chosen;
}

char * slot_memory::address(uint32_t slot, layer_id layer, part_id part) const {
    return bank_of(slot).base + place(layer, part).offset + number(slot) * stride(layer, part);
}

char * slot_memory::data(uint32_t slot, expert_id id, part_id part) const {
    const size_t before = data_offset(index_.locate(tier_, id.layer, part, id.expert));
    return address(slot, id.layer, part) + (is_set(id, part) ? 0 : before);
}

ggml_backend_buffer_t slot_memory::buffer(uint32_t slot, expert_id id, part_id part) const {
    return (is_packed(id, part) ? bank_of(slot).packed : bank_of(slot).buffer).get();
}

part_target slot_memory::target(uint32_t slot, expert_id id, part_id part) const {
    part_target t = { address(slot, id.layer, part), nullptr, {}, place(id.layer, part).zeros };
    if (is_set(id, part)) {
        t.buffer = buffer(slot, id, part);
        t.shape  = index_.layer(id.layer).shapes[part];
    }
    return t;
}

void slot_memory::free() {
    commit_.end();
    buffers_.clear();
    banks_ = {};
}

bool slot_memory::allocate_bank(ggml_backend_buffer_type_t packed, size_t size) {
    memory_bank &         bank  = buffers_.emplace_back();
    const size_t          room  = size + file_reader::alignment;
    ggml_backend_buffer_t owner = ggml_backend_buft_alloc_buffer(packed ? packed : memory(), room);
    (packed ? bank.packed : bank.buffer).reset(owner);
    const bool is_shared = in_host() && !is_host_device(device_);
    if (!owner || (is_shared && ggml_backend_buffer_get_type(owner) != memory())) { // not what a driver has left
        return false;
    }
    bank.base = aligned_base(owner, file_reader::alignment);
    if (!in_host()) {
        ggml_backend_buffer_clear(owner, 0); // kernels multiply what follows a row by zero: it must be a number
    }
    if (packed) {
        bank.buffer.reset(ggml_backend_cpu_buffer_from_ptr(bank.base, size));
    }
    return true;
}

// The most that the device can allocate, if the device tells it.
static std::string say_free(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t device = ggml_backend_buft_get_device(buft);
    const size_t       free   = device ? free_memory(device) : 0;
    return free > 0 ? format(", of which %s are free", format_size(double(free)).c_str()) : "";
}

void slot_memory::commit_pages(uint64_t spare) {
    std::vector<page_commit::range> pages;
    for (const memory_bank & bank : buffers_) {
        char * first = page_of(bank.base);
        pages.push_back({ first, size_t(bank.base + banks_.bank_size - first) });
    }
    commit_.start(std::move(pages), spare);
}

status slot_memory::fit(uint32_t & n_slots) const {
    slot_layout::bank_plan plan;
    HOBBIT_TRY(n_slots > 0 ? slot_layout(*this).plan_banks(n_slots, plan) : status());
    n_slots = plan.n_slots;
    return {};
}

status slot_memory::allocate(uint32_t n_slots, uint64_t spare) {
    slot_layout::bank_plan plan;
    HOBBIT_TRY(plan_banks(n_slots, plan));
    free();
    ggml_backend_buffer_type_t buft    = memory();
    ggml_backend_buffer_type_t packed  = choose_packed();
    const uint32_t             n_banks = (plan.n_slots + plan.slots_per_bank - 1) / plan.slots_per_bank;
    const char * options = in_host() ? "--pools or --memory" : "--pools or --device-memory, or check the device";
    for (uint32_t i = 0; i < n_banks; i++) {
        if (!allocate_bank(packed, plan.bank_size)) {
            free();
            return status::error("cannot allocate %s for expert pools on %s%s: give a smaller %s",
                                 format_size(double(plan.bank_size) * n_banks).c_str(), ggml_backend_buft_name(buft),
                                 say_free(buft).c_str(), options);
        }
    }
    const auto is_other = [&](const memory_bank & bank) {
        return ggml_backend_buffer_get_type(bank.buffer.get()) != buft;
    };
    if (!packed && std::any_of(buffers_.begin(), buffers_.end(), is_other)) {
        GGML_LOG_WARN("hobbit: the driver has no more %s memory: expert pools are in ordinary memory, which is slower "
                      "to copy from; give a smaller %s\n",
                      ggml_backend_buft_name(buft), options);
    }
    banks_ = plan;
    if (in_host()) {
        commit_pages(spare);
    }
    return {};
}

} // namespace hobbit
