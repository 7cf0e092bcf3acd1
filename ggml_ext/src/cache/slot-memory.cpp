// SPDX-License-Identifier: MIT
#include "cache/slot-memory.h"

#include "base/system-memory.h"
#include "device/device-traits.h"
#include "device/repacked-layout.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "io/file-reader.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace hobbit {

//
// layout
//

void slot_memory::lay_out(const expert_index & index, tier_id tier, ggml_backend_dev_t device,
                          ggml_backend_buffer_type_t memory, bool pack) {
    index_  = &index;
    tier_   = tier;
    device_ = device;
    pack_   = pack;
    layout_ = slot_layout(index, tier, device, memory);
}

// All packed parts have the same layout: the first one that the device has for any part.
ggml_backend_buffer_type_t slot_memory::choose_packed() {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_                     = { index_->n_layers(), index_->n_experts() };
    if (!pack_) {
        return nullptr;
    }
    using kind = std::tuple<layer_id, part_id, ggml_type>;
    std::map<kind, bool> are_packed;
    index_->each_matrix(tier_, [&](expert_id id, part_id part, const part_location & at) {
        const auto [known, is_new] = are_packed.try_emplace({ id.layer, part, at.type });
        if (is_new) {
            const layer_shape & shape  = index_->layer(id.layer);
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
    return bank_of(slot).base + layout_.place(layer, part).offset + number(slot) * stride(layer, part);
}

char * slot_memory::data(uint32_t slot, expert_id id, part_id part) const {
    const size_t before = data_offset(index_->locate(tier_, id.layer, part, id.expert));
    return address(slot, id.layer, part) + (is_set(id, part) ? 0 : before);
}

ggml_backend_buffer_t slot_memory::buffer(uint32_t slot, expert_id id, part_id part) const {
    return (is_packed(id, part) ? bank_of(slot).packed : bank_of(slot).buffer).get();
}

part_target slot_memory::target(uint32_t slot, expert_id id, part_id part) const {
    part_target t = { address(slot, id.layer, part) };
    if (is_set(id, part)) {
        t.buffer = buffer(slot, id, part);
        t.shape  = index_->layer(id.layer).shapes[part];
        t.zeros  = layout_.place(id.layer, part).zeros;
    }
    return t;
}

//
// banks
//

void slot_memory::free() {
    commit_.end();
    memory_.clear();
    banks_ = {};
}

bool slot_memory::allocate_bank(ggml_backend_buffer_type_t packed, size_t size) {
    memory_bank &         bank  = memory_.emplace_back();
    const size_t          room  = size + file_reader::alignment;
    ggml_backend_buffer_t owner = ggml_backend_buft_alloc_buffer(packed ? packed : layout_.memory(), room);
    (packed ? bank.packed : bank.buffer).reset(owner);
    if (!owner) {
        return false;
    }
    bank.base = aligned_base(owner, file_reader::alignment);
    if (!layout_.in_host()) {
        ggml_backend_buffer_clear(owner, 0); // kernels multiply what follows a row by zero: it must be a number
    } else {
        ask_for_huge_pages(bank.base, size);
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

void slot_memory::commit_pages() {
    std::vector<page_commit::range> pages;
    for (const memory_bank & bank : memory_) {
        char * first = page_of(bank.base);
        pages.push_back({ first, size_t(bank.base + banks_.bank_size - first) });
    }
    commit_.start(std::move(pages), spare_);
}

status slot_memory::fit(uint32_t & n_slots) const {
    slot_layout::bank_plan plan;
    HOBBIT_TRY(n_slots > 0 ? slot_layout(layout_).plan_banks(n_slots, plan) : status());
    n_slots = plan.n_slots;
    return {};
}

status slot_memory::allocate(uint32_t n_slots, uint64_t spare) {
    slot_layout::bank_plan plan;
    HOBBIT_TRY(layout_.plan_banks(n_slots, plan));
    free();
    ggml_backend_buffer_type_t buft    = layout_.memory();
    ggml_backend_buffer_type_t packed  = choose_packed();
    const uint32_t             n_banks = (plan.n_slots + plan.slots_per_bank - 1) / plan.slots_per_bank;
    const char *               options =
        layout_.in_host() ? "--pools or --memory" : "--pools or --device-memory, or check the device";
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
    if (!packed && std::any_of(memory_.begin(), memory_.end(), is_other)) {
        GGML_LOG_WARN("hobbit: the driver has no more %s memory: expert pools are in ordinary memory, which is slower "
                      "to copy from; give a smaller %s\n",
                      ggml_backend_buft_name(buft), options);
    }
    banks_    = plan;
    spare_    = layout_.in_host() ? spare : 0;
    n_unseen_ = 0;
    if (layout_.in_host()) {
        commit_pages();
    }
    return {};
}

// How much may be used between two looks, which take some 100 microseconds each.
static constexpr uint64_t UNSEEN = 16u << 20;

bool slot_memory::has_memory(uint32_t slot) {
    if (spare_ == 0 || commit_.committed() >= (slot + 1) * uint64_t(slot_size())) {
        return true;
    }
    n_unseen_ += slot_size();
    if (n_unseen_ < UNSEEN) {
        return true;
    }
    n_unseen_ = 0;
    return available_memory() >= spare_ + UNSEEN;
}

} // namespace hobbit
