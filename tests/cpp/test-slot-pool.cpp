// SPDX-License-Identifier: MIT
#include "slot-pool.h"

#include "file-reader.h"

#include <cstring>
#include <doctest/doctest.h>
#include <string>

using namespace hobbit;

static constexpr size_t SLOT = 2 * file_reader::alignment;

TEST_CASE("slots are aligned and none overlaps another") {
    slot_pool pool;
    REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), nullptr, SLOT, 5).ok());
    CHECK(pool.n_slots() == 5);
    CHECK(pool.slot_size() == SLOT);
    for (uint32_t slot = 0; slot < 5; slot++) {
        CHECK(uintptr_t(pool.data(slot)) % file_reader::alignment == 0);
        memset(pool.data(slot), int(slot) + 1, SLOT); // a sanitizer sees it if this is outside the buffer
    }
    for (uint32_t slot = 0; slot < 5; slot++) {
        const std::string written(SLOT, char(slot + 1));
        CHECK(memcmp(pool.data(slot), written.data(), SLOT) == 0);
    }
}

TEST_CASE("the slots lie in the pool's buffer") {
    slot_pool pool;
    REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), nullptr, SLOT, 3).ok());
    const char * base = static_cast<const char *>(ggml_backend_buffer_get_base(pool.buffer()));
    CHECK(pool.data(0) >= base);
    CHECK(pool.data(2) + SLOT <= base + ggml_backend_buffer_get_size(pool.buffer()));
}

TEST_CASE("too large a pool is an error that says what to do") {
    slot_pool    pool;
    const status s = pool.allocate(ggml_backend_cpu_buffer_type(), nullptr, size_t(1) << 46, 4096); // 2^58 bytes
    REQUIRE_FALSE(s.ok());
    CHECK(s.message().find("cannot allocate") != std::string::npos);
    CHECK(s.message().find("--pools") != std::string::npos);
    CHECK(pool.n_slots() == 0);
}

TEST_CASE("a pool never allocated has no slots") {
    slot_pool pool;
    CHECK(pool.n_slots() == 0);
    CHECK(pool.buffer() == nullptr);
}
