// SPDX-License-Identifier: MIT
#include "base/system-memory.h"

#include "fixtures/temp-dir.h"

#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

using namespace hobbit;

static constexpr uint64_t MiB = 1024 * 1024;

TEST_CASE("memory counts as resident once it is touched, and no more when it is returned") {
    const size_t   size   = 64 * MiB;
    const uint64_t before = resident_memory();
    CHECK(before > MiB / 4);
    void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    CHECK(resident_memory() < before + 16 * MiB);
    memset(memory, 1, size);
    CHECK(resident_memory() >= before + 60 * MiB);
    munmap(memory, size);
    CHECK(resident_memory() < before + 16 * MiB);
}

TEST_CASE("what is available is something, and less than the machine has") {
    const uint64_t machine = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
    CHECK(available_memory() > MiB);
    CHECK(available_memory() < machine);
}

TEST_CASE("a cgroup leaves its limit less what it uses, but for the page cache") {
    const temp_dir    folder;
    const std::string dir   = folder.path("");
    const auto        write = [&](const char * name, const char * text) { folder.write(name, text); };
    const auto        room  = [&] { return cgroup_room(dir, "memory.max", "memory.current", "inactive_file"); };
    CHECK(room() == UINT64_MAX);
    write("memory.max", "100000\n");
    write("memory.current", "70000\n");
    write("memory.stat", "anon 1\ninactive_file 20000\n");
    CHECK(room() == 50000);
    write("memory.max", "max\n");
    CHECK(room() == UINT64_MAX);
}
