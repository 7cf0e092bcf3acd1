// SPDX-License-Identifier: MIT
#include "cache/slot-memory.h"

#include "device/repacked-layout.h"
#include "io/file-reader.h"

#include <map>
#include <tuple>

namespace hobbit {

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
    return chosen;
}

status slot_memory::allocate(uint32_t n_slots, uint64_t spare) {
    slot_layout::bank_plan banks;
    HOBBIT_TRY(layout_.plan_banks(n_slots, banks));
    const char * options =
        layout_.in_host() ? "--pools or --memory" : "--pools or --device-memory, or check the device";
    return pool_.allocate(layout_.memory(), choose_packed(), banks.bank_size, banks.slots_per_bank, banks.n_slots,
                          options, layout_.in_host() ? spare : 0);
}

char * slot_memory::address(uint32_t slot, layer_id layer, part_id part) const {
    return pool_.bank(slot) + layout_.place(layer, part).offset + number(slot) * stride(layer, part);
}

char * slot_memory::data(uint32_t slot, expert_id id, part_id part) const {
    const size_t before = data_offset(index_->locate(tier_, id.layer, part, id.expert));
    return address(slot, id.layer, part) + (is_set(id, part) ? 0 : before);
}

ggml_backend_buffer_t slot_memory::buffer(uint32_t slot, expert_id id, part_id part) const {
    return is_packed(id, part) ? pool_.packed(slot) : pool_.buffer(slot);
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

} // namespace hobbit
