// SPDX-License-Identifier: MIT
#include "cache/slot-pool.h"

#include "base/system-memory.h"
#include "device/device-traits.h"
#include "ggml-impl.h"
#include "io/file-reader.h"

#include <algorithm>

namespace hobbit {

void slot_pool::free() {
    commit_.end();
    banks_.clear();
    n_slots_ = 0;
}

bool slot_pool::allocate_bank(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t size,
                              memory_bank & bank) {
    ggml_backend_buffer_t owner = ggml_backend_buft_alloc_buffer(packed ? packed : buft, size + file_reader::alignment);
    (packed ? bank.packed : bank.buffer).reset(owner);
    if (!owner) {
        return false;
    }
    bank.base = aligned_base(owner, file_reader::alignment);
    if (!ggml_backend_buft_is_host(buft)) {
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

status slot_pool::allocate(ggml_backend_buffer_type_t buft, ggml_backend_buffer_type_t packed, size_t bank_size,
                           uint32_t slots_per_bank, uint32_t n_slots, const char * options, uint64_t spare) {
    GGML_ASSERT(n_slots > 0 && slots_per_bank > 0);
    free();
    const uint32_t n_banks = (n_slots + slots_per_bank - 1) / slots_per_bank;
    for (uint32_t i = 0; i < n_banks; i++) {
        banks_.emplace_back();
        if (!allocate_bank(buft, packed, bank_size, banks_.back())) {
            free();
            return status::error("cannot allocate %s for expert pools on %s%s: give a smaller %s",
                                 format_size(double(bank_size) * n_banks).c_str(), ggml_backend_buft_name(buft),
                                 say_free(buft).c_str(), options);
        }
    }
    const auto is_other = [&](const memory_bank & bank) {
        return ggml_backend_buffer_get_type(bank.buffer.get()) != buft;
    };
    if (!packed && std::any_of(banks_.begin(), banks_.end(), is_other)) {
        GGML_LOG_WARN("hobbit: the driver has no more %s memory: expert pools are in ordinary memory, which is slower "
                      "to "
                      "copy from; give a smaller %s\n",
                      ggml_backend_buft_name(buft), options);
    }
    if (ggml_backend_buft_is_host(buft)) {
        std::vector<page_commit::range> pages;
        for (const memory_bank & bank : banks_) {
            char * first = page_of(bank.base);
            pages.push_back({ first, size_t(bank.base + bank_size - first) });
        }
        commit_.start(std::move(pages), spare);
    }
    slots_per_bank_ = slots_per_bank;
    n_slots_        = n_slots;
    slot_size_      = bank_size / slots_per_bank;
    spare_          = spare;
    n_unseen_       = 0;
    return {};
}

// How much may be used between two looks, which take some 100 microseconds each.
static constexpr uint64_t UNSEEN = 16u << 20;

bool slot_pool::has_memory(uint32_t slot) {
    if (spare_ == 0 || commit_.committed() >= (slot + 1) * uint64_t(slot_size_)) {
        return true;
    }
    n_unseen_ += slot_size_;
    if (n_unseen_ < UNSEEN) {
        return true;
    }
    n_unseen_ = 0;
    return available_memory() >= spare_ + UNSEEN;
}

} // namespace hobbit
