// SPDX-License-Identifier: MIT
#include "cache/slot-memory.h"

#include "base/system-memory.h"
#include "fixtures/cache-fixture.h"
#include "fixtures/page-locked.h"
#include "io/file-reader.h"

#include <cstdio>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

static constexpr expert_id FIRST = { 0, 0 };

// Slots for the high tier, on the CPU.
struct high_slots : slot_memory {
    explicit high_slots(const opened_model & model, ggml_backend_buffer_type_t in = ggml_backend_cpu_buffer_type()) :
        slot_memory(model.index, tier_id::high, model.index.layers(),
                    ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), in, false) {}
};

static char * base_of(const slot_memory & slots, uint32_t slot) {
    return slots.target(slot, FIRST, part_id::gate).data;
}

static ggml_backend_buffer_t buffer_of(const slot_memory & slots, uint32_t slot) {
    return slots.buffer(slot, FIRST, part_id::gate);
}

TEST_CASE("banks are aligned, lie in their buffers, and none overlaps another") {
    const opened_model model;
    page_locked        memory;
    high_slots         slots(model, &memory.type);
    const size_t       size = slots.slot_size();
    memory.max_size         = 3 * size + file_reader::alignment;
    REQUIRE(slots.allocate(9).ok());
    CHECK(slots.n_slots() == 9);
    CHECK(slots.n_numbers() == 3);
    for (uint32_t slot = 0; slot < 9; slot++) {
        CHECK(uintptr_t(base_of(slots, slot)) % file_reader::alignment == 0);
        CHECK((buffer_of(slots, slot) == buffer_of(slots, 0)) == (slot < 3));
        const char * base = static_cast<const char *>(ggml_backend_buffer_get_base(buffer_of(slots, slot)));
        CHECK(base_of(slots, slot) >= base);
        CHECK(base_of(slots, slot) + size <= base + ggml_backend_buffer_get_size(buffer_of(slots, slot)));
        memset(base_of(slots, slot), int(slot) + 1, size); // a sanitizer sees it if this is outside the buffer
    }
    for (uint32_t slot = 0; slot < 9; slot++) {
        CHECK(std::string(base_of(slots, slot), size) == std::string(size, char(slot + 1)));
    }
}

// The flags of the mapping that has this address, as the kernel names them.
static std::string flags_at(const char * address) {
    std::ifstream smaps("/proc/self/smaps");
    bool          is_here = false;
    for (std::string line; std::getline(smaps, line);) {
        uintptr_t first = 0, end = 0;
        if (sscanf(line.c_str(), "%zx-%zx ", &first, &end) == 2) {
            is_here = first <= uintptr_t(address) && uintptr_t(address) < end;
        } else if (is_here && line.rfind("VmFlags:", 0) == 0) {
            return line + " ";
        }
    }
    return "";
}

TEST_CASE("the kernel is asked for huge pages, where it has any") {
    if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
        return;
    }
    constexpr size_t   size = size_t(8) << 20;
    const opened_model model;
    high_slots         slots(model);
    REQUIRE(slots.allocate(uint32_t(size / slots.slot_size())).ok());
    CHECK(flags_at(base_of(slots, 0) + size / 2).find(" hg ") != std::string::npos);
}

TEST_CASE("the error of a device that is full says how much could be had, and what to do") {
    ggml_backend_device full   = *ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    full.iface.get_memory      = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 5 << 20; };
    ggml_backend_buffer_type b = *ggml_backend_cpu_buffer_type();
    b.device                   = &full;
    b.iface.alloc_buffer       = [](ggml_backend_buffer_type_t, size_t) -> ggml_backend_buffer_t { return nullptr; };
    const opened_model model;
    high_slots         slots(model, &b);
    CHECK(slots.allocate(64).message() == "cannot allocate " + format_size(64.0 * double(slots.slot_size())) +
                                              " for expert pools on CPU, of which 5.0 MiB are free: give a smaller "
                                              "--pools or --memory");
    CHECK(slots.n_slots() == 0);
}

TEST_CASE("where a driver has no more page-locked memory, banks are in ordinary memory") {
    const opened_model model;
    page_locked        memory;
    high_slots         slots(model, &memory.type);
    memory.n_buffers = 1;
    memory.max_size  = slots.slot_size() + file_reader::alignment;
    REQUIRE(slots.allocate(2).ok());
    CHECK(ggml_backend_buffer_get_type(buffer_of(slots, 0)) == &memory.type);
    CHECK(ggml_backend_buffer_get_type(buffer_of(slots, 1)) == ggml_backend_cpu_buffer_type());
    memset(base_of(slots, 1), 1, slots.slot_size());
}

TEST_CASE("memory never allocated has no slots") {
    CHECK(high_slots(opened_model()).n_slots() == 0);
}
