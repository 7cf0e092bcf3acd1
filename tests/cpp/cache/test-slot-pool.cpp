// SPDX-License-Identifier: MIT
#include "cache/slot-pool.h"

#include "base/system-memory.h"
#include "fixtures/page-locked.h"
#include "io/file-reader.h"

#include <cstdio>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

using namespace hobbit;

static constexpr size_t BANK = 2 * file_reader::alignment;

static status allocate(slot_pool & pool, size_t bank_size, uint32_t slots_per_bank, uint32_t n_slots) {
    return pool.allocate(ggml_backend_cpu_buffer_type(), nullptr, bank_size, slots_per_bank, n_slots, "--pools");
}

TEST_CASE("banks are aligned and none overlaps another") {
    slot_pool pool;
    REQUIRE(allocate(pool, BANK, 3, 8).ok());
    CHECK(pool.n_slots() == 8);
    CHECK(pool.slots_per_bank() == 3);
    for (uint32_t slot = 0; slot < 8; slot += 3) {
        CHECK(uintptr_t(pool.bank(slot)) % file_reader::alignment == 0);
        memset(pool.bank(slot), int(slot) + 1, BANK); // a sanitizer sees it if this is outside the buffer
    }
    for (uint32_t slot = 0; slot < 8; slot++) {
        const std::string written(BANK, char(slot / 3 * 3 + 1));
        CHECK(memcmp(pool.bank(slot), written.data(), BANK) == 0);
    }
}

TEST_CASE("a bank lies in its buffer") {
    slot_pool pool;
    REQUIRE(allocate(pool, BANK, 2, 3).ok());
    for (uint32_t slot = 0; slot < 3; slot++) {
        const char * base = static_cast<const char *>(ggml_backend_buffer_get_base(pool.buffer(slot)));
        CHECK(pool.bank(slot) >= base);
        CHECK(pool.bank(slot) + BANK <= base + ggml_backend_buffer_get_size(pool.buffer(slot)));
    }
    CHECK(pool.buffer(0) == pool.buffer(1));
    CHECK(pool.buffer(0) != pool.buffer(2));
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
    constexpr size_t size = size_t(8) << 20;
    slot_pool        pool;
    REQUIRE(allocate(pool, size, 1, 1).ok());
    CHECK(flags_at(pool.bank(0) + size / 2).find(" hg ") != std::string::npos);

    const std::vector<char> memory(size); // a bank begins within a page where pages are large
    char *                  bank = const_cast<char *>(memory.data()) + 100;
    CHECK(flags_at(bank + size / 2).find(" hg ") == std::string::npos);
    ask_for_huge_pages(bank, size - 100);
    CHECK(flags_at(bank + size / 2).find(" hg ") != std::string::npos);
}

TEST_CASE("too large a pool is an error that says what to do") {
    slot_pool    pool;
    const status s = allocate(pool, size_t(1) << 58, 4096, 4096);
    REQUIRE_FALSE(s.ok());
    CHECK(s.message().find("cannot allocate") != std::string::npos);
    CHECK(s.message().find("--pools") != std::string::npos);
    CHECK(pool.n_slots() == 0);
}

TEST_CASE("of a device that is full, the error says how much could be had") {
    ggml_backend_device full   = *ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    full.iface.get_memory      = [](ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 5 << 20; };
    ggml_backend_buffer_type b = *ggml_backend_cpu_buffer_type();
    b.device                   = &full;
    b.iface.alloc_buffer       = [](ggml_backend_buffer_type_t, size_t) -> ggml_backend_buffer_t { return nullptr; };
    slot_pool    pool;
    const status s = pool.allocate(&b, nullptr, BANK, 1, 1024, "--pools");
    CHECK(s.message() ==
          "cannot allocate 8.0 MiB for expert pools on CPU, of which 5.0 MiB are free: give a smaller --pools");
}

TEST_CASE("where a driver has no more page-locked memory, banks are in ordinary memory") {
    page_locked memory;
    slot_pool   pool;
    memory.n_buffers = 1;
    REQUIRE(pool.allocate(&memory.type, nullptr, BANK, 1, 2, "--memory").ok());
    CHECK(ggml_backend_buffer_get_type(pool.buffer(0)) == &memory.type);
    CHECK(ggml_backend_buffer_get_type(pool.buffer(1)) == ggml_backend_cpu_buffer_type());
    memset(pool.bank(1), 1, BANK);
}

TEST_CASE("a pool never allocated has no slots") {
    slot_pool pool;
    CHECK(pool.n_slots() == 0);
}

TEST_CASE("a pool asks for no more memory where the system has none to spare") {
    constexpr size_t   SLOT = 4u << 20;
    constexpr uint64_t ALL  = uint64_t(1) << 60;
    for (const uint64_t spare : { uint64_t(0), uint64_t(1), ALL }) {
        CAPTURE(spare);
        slot_pool pool;
        REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), nullptr, 16 * SLOT, 16, 16, "", spare).ok());
        uint32_t n_used = 0;
        while (n_used < 16 && pool.has_memory(n_used)) {
            n_used++;
        }
        CHECK(n_used == (spare == ALL ? 3 : 16)); // it looks after 16 MiB
    }
}
