// SPDX-License-Identifier: MIT
#include "slot-pool.h"

#include "file-reader.h"

#include <cstring>
#include <doctest/doctest.h>
#include <set>
#include <string>

using namespace hobbit;

static constexpr size_t SLOT = 2 * file_reader::alignment;

TEST_CASE("every slot is handed out once, aligned, and none overlaps another") {
    slot_pool pool;
    REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), SLOT, 5).ok());
    CHECK(pool.n_slots() == 5);
    CHECK(pool.n_free() == 5);
    CHECK(pool.slot_size() == SLOT);

    std::set<uint32_t> taken;
    for (uint32_t i = 0; i < 5; i++) {
        const uint32_t slot = pool.take();
        CHECK(slot < 5);
        CHECK(taken.insert(slot).second);
        CHECK(uintptr_t(pool.data(slot)) % file_reader::alignment == 0);
        memset(pool.data(slot), int(slot) + 1, SLOT); // a sanitizer sees it if this is outside the buffer
    }
    CHECK(pool.n_free() == 0);
    for (uint32_t slot = 0; slot < 5; slot++) {
        const std::string written(SLOT, char(slot + 1));
        CHECK(memcmp(pool.data(slot), written.data(), SLOT) == 0);
    }
}

TEST_CASE("a slot given back is handed out again") {
    slot_pool pool;
    REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), SLOT, 2).ok());
    const uint32_t first  = pool.take();
    const uint32_t second = pool.take();
    pool.give(first);
    CHECK(pool.n_free() == 1);
    CHECK(pool.take() == first);
    pool.give(second);
    CHECK(pool.take() == second);
}

TEST_CASE("the slots lie in the pool's buffer") {
    slot_pool pool;
    REQUIRE(pool.allocate(ggml_backend_cpu_buffer_type(), SLOT, 3).ok());
    const char * base = static_cast<const char *>(ggml_backend_buffer_get_base(pool.buffer()));
    CHECK(pool.data(0) >= base);
    CHECK(pool.data(2) + SLOT <= base + ggml_backend_buffer_get_size(pool.buffer()));
}

TEST_CASE("too large a pool is an error that says what to do") {
    slot_pool    pool;
    const status s = pool.allocate(ggml_backend_cpu_buffer_type(), size_t(1) << 46, 4096); // 2^58 bytes
    REQUIRE_FALSE(s.ok());
    CHECK(s.message().find("cannot allocate") != std::string::npos);
    CHECK(s.message().find("--pools") != std::string::npos);
    CHECK(pool.n_slots() == 0);
}

TEST_CASE("a pool never allocated has no slots") {
    slot_pool pool;
    CHECK(pool.n_slots() == 0);
    CHECK(pool.n_free() == 0);
    CHECK(pool.buffer() == nullptr);
}
