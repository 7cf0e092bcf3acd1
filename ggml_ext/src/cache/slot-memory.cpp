// SPDX-License-Identifier: MIT
#include "cache/slot-memory.h"

#include "device/device-traits.h"
#include "device/repacked-layout.h"
#include "io/file-reader.h"

#include <map>

namespace hobbit {

void slot_memory::lay_out(const expert_index & index, term_id term, ggml_backend_dev_t device,
                          ggml_backend_buffer_type_t memory, bool pack) {
    index_   = &index;
    term_    = term;
    device_  = device;
    memory_  = memory;
    in_host_ = is_host_device(device);
    pack_    = pack;
    layout_  = slot_layout(index, term, device, memory);
}

// All packed parts have the same layout: the first one that the device has for any part.
ggml_backend_buffer_type_t slot_memory::choose_packed() {
    ggml_backend_buffer_type_t chosen = nullptr;
    packed_parts_                     = { index_->n_layers(), index_->n_experts() };
    for (layer_id layer = 0; pack_ && layer < index_->n_layers(); layer++) {
        const layer_shape & shape = index_->layer(layer);
        for (const part_id part : shape.parts) {
            std::map<ggml_type, bool> is_packed;
            for (uint32_t e = 0; e < shape.n_experts; e++) {
                if (!index_->has(term_, { layer, e })) {
                    continue;
                }
                const ggml_type type = index_->locate(term_, layer, part, e).type;
                if (is_packed.count(type) == 0) {
                    const auto layout = packed_layout(device_, type, shape.shapes[part], shape.n_experts);
                    chosen            = chosen ? chosen : layout;
                    is_packed[type]   = layout && layout == chosen;
                }
                packed_parts_[{ layer, e }] |= is_packed[type] ? part_set(part) : part_set();
            }
        }
    }
    return chosen;
}

status slot_memory::allocate(uint32_t n_slots, uint64_t spare) {
    slot_layout::bank_plan banks;
    HOBBIT_TRY(layout_.plan_banks(n_slots, banks));
    const char * options = in_host_ ? "--pools or --memory" : "--pools or --device-memory, or check the device";
    return pool_.allocate(memory_, choose_packed(), banks.bank_size, banks.slots_per_bank, banks.n_slots, options,
                          in_host_ ? spare : 0);
}

char * slot_memory::address(uint32_t slot, layer_id layer, part_id part) const {
    return pool_.bank(slot) + layout_.place(layer, part).offset + number(slot) * stride(layer, part);
}

char * slot_memory::data(uint32_t slot, expert_id id, part_id part) const {
    const size_t before = data_offset(index_->locate(term_, id.layer, part, id.expert));
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
