// SPDX-License-Identifier: MIT
#include "base/system-memory.h"

#include "fixtures/fake-machine.h"
#include "hobbit.h"

#include <cstring>
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace hobbit;

static constexpr uint64_t MiB = 1024 * 1024;

TEST_CASE("memory counts as resident once it is touched, and no more when it is returned") {
    const size_t   size   = 64 * MiB;
    const uint64_t before = hobbit_resident_memory();
    CHECK(before > MiB / 4);
    void * memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    CHECK(hobbit_resident_memory() < before + 16 * MiB);
    memset(memory, 1, size);
    CHECK(hobbit_resident_memory() >= before + 60 * MiB);
    munmap(memory, size);
    CHECK(hobbit_resident_memory() < before + 16 * MiB);
}

TEST_CASE("every byte belongs to the page that begins at or before it") {
    const auto page  = uintptr_t(sysconf(_SC_PAGESIZE));
    char *     first = reinterpret_cast<char *>(5 * page);
    for (const uintptr_t offset : { uintptr_t(0), uintptr_t(1), page / 2, page - 1 }) {
        CHECK(page_of(first + offset) == first);
    }
    CHECK(page_of(first + page) == first + page);
}

TEST_CASE("what is available is something, and less than the machine has") {
    const uint64_t machine = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
    CHECK(hobbit_available_memory() > MiB);
    CHECK(hobbit_available_memory() < machine);
}

TEST_CASE("without a limit the machine's available memory counts") {
    const fake_machine machine(1000 * MiB);
    CHECK(hobbit_available_memory() == 1000 * MiB); // no cgroups at all
    machine.write("proc/self/cgroup", "0::/user.slice\n");
    machine.write("sys/fs/cgroup/user.slice/memory.max", "max\n");
    machine.write("sys/fs/cgroup/user.slice/memory.current", "70000\n");
    CHECK(hobbit_available_memory() == 1000 * MiB);
}

TEST_CASE("a cgroup leaves its limit less what it uses, but for the page cache") {
    const fake_machine machine(1000 * MiB);
    machine.write("proc/self/cgroup", "0::/a\n");
    machine.write("sys/fs/cgroup/a/memory.max", "100000\n");
    CHECK(hobbit_available_memory() == 1000 * MiB); // the cgroup's use is not known
    machine.write("sys/fs/cgroup/a/memory.current", "70000\n");
    CHECK(hobbit_available_memory() == 30000); // without memory.stat
    machine.write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 20000\n");
    CHECK(hobbit_available_memory() == 50000);
    machine.write("sys/fs/cgroup/a/memory.stat",
                  "shmem 7\ninactive_file 20000\nactive_file 9000\nslab_reclaimable 800\nslab_unreclaimable 7\n");
    CHECK(hobbit_available_memory() == 59800);
    machine.write("sys/fs/cgroup/a/memory.stat", "inactive_file 80000\n"); // more than is in use
    CHECK(hobbit_available_memory() == 100000);
    machine.write("sys/fs/cgroup/a/memory.stat", "inactive_file 0\n");
    machine.write("sys/fs/cgroup/a/memory.current", "200000\n"); // above the limit, which was lowered
    CHECK(hobbit_available_memory() == 0);
}

TEST_CASE("above memory.high the kernel takes memory back, so it is a limit") {
    const fake_machine machine(1000 * MiB);
    machine.write("proc/self/cgroup", "0::/a\n");
    machine.write("sys/fs/cgroup/a/memory.max", "max\n");
    machine.write("sys/fs/cgroup/a/memory.high", "100000\n");
    machine.write("sys/fs/cgroup/a/memory.current", "70000\n");
    CHECK(hobbit_available_memory() == 30000);
    CHECK(hobbit_memory_limit() == 100000);
    machine.write("sys/fs/cgroup/a/memory.max", "90000\n");
    CHECK(hobbit_memory_limit() == 90000);
    machine.write("sys/fs/cgroup/a/memory.high", "max\n");
    CHECK(hobbit_available_memory() == 20000);
}

TEST_CASE("the cache of ZFS is memory that the kernel gives back, down to its least size") {
    const fake_machine machine(1000 * MiB);
    const auto         write = [&](uint64_t mru) {
        machine.write("proc/spl/kstat/zfs/arcstats",
                              "13 1 0x01 123 33456 1 2\nname type data\nsize 4 " + std::to_string(8192 * MiB) + "\nc_min 4 " +
                                  std::to_string(1024 * MiB) + "\nmru_evictable_data 4 " + std::to_string(mru * MiB) +
                                  "\nmfu_evictable_data 4 " + std::to_string(2048 * MiB) + "\n");
    };
    write(3072);
    CHECK(hobbit_available_memory() == 6120 * MiB);
    write(9999); // more than lies above the least size
    CHECK(hobbit_available_memory() == 8168 * MiB);
}

TEST_CASE("the tightest of a cgroup and its ancestors holds") {
    const fake_machine machine(1000 * MiB);
    machine.write("proc/self/cgroup", "0::/a/b/c\n");
    const auto limit = [&](const std::string & folder, const char * bytes) {
        machine.write("sys/fs/cgroup" + folder + "/memory.max", bytes);
        machine.write("sys/fs/cgroup" + folder + "/memory.current", "1000\n");
    };
    limit("/a/b/c", "max\n");
    limit("/a/b", "50000\n");
    limit("/a", "90000\n");
    CHECK(hobbit_available_memory() == 49000);
    limit("", "40000\n"); // a container sees its own cgroup as the root
    CHECK(hobbit_available_memory() == 39000);
    CHECK(hobbit_memory_limit() == 40000);
    limit("/a/b/c", "30000\n");
    CHECK(hobbit_available_memory() == 29000);
}

TEST_CASE("version 1 has the memory of all descendants in a hierarchy of its own") {
    const fake_machine machine(1000 * MiB);
    machine.write("proc/self/cgroup", "9:cpu,cpuacct:/x\n7:memory:/docker/1\n0::/y\nnonsense\n");
    machine.write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "100000\n");
    machine.write("sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", "70000\n");
    machine.write("sys/fs/cgroup/memory/docker/1/memory.stat",
                  "inactive_file 5\ntotal_inactive_file 20000\nactive_file 7\n");
    CHECK(hobbit_available_memory() == 50000);
    machine.write("sys/fs/cgroup/memory/docker/1/memory.stat", "total_inactive_file 20000\ntotal_active_file 4000\n");
    CHECK(hobbit_available_memory() == 54000);
    CHECK(hobbit_memory_limit() == 100000);
    machine.write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "80000\n");
    machine.write("sys/fs/cgroup/memory/docker/memory.usage_in_bytes", "75000\n");
    CHECK(hobbit_available_memory() == 5000);
    machine.write("sys/fs/cgroup/x/memory.max", "1\n"); // limit of another controller
    machine.write("sys/fs/cgroup/x/memory.current", "0\n");
    CHECK(hobbit_available_memory() == 5000);
    machine.write("sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "9223372036854771712\n"); // no limit
    machine.write("sys/fs/cgroup/memory/docker/memory.limit_in_bytes", "9223372036854771712\n");
    CHECK(hobbit_available_memory() == 1000 * MiB);
}

TEST_CASE("a display is known by the environment, or by the socket of an X server") {
    for (const char * variable : { "DISPLAY", "WAYLAND_DISPLAY" }) {
        unsetenv(variable);
    }
    const fake_machine machine(1000 * MiB);
    CHECK_FALSE(has_display());
    for (const char * variable : { "DISPLAY", "WAYLAND_DISPLAY" }) {
        setenv(variable, ":0", 1);
        CHECK(has_display());
        setenv(variable, "", 1);
        CHECK_FALSE(has_display());
        unsetenv(variable);
    }
    machine.write("tmp/.X11-unix/X0", "");
    CHECK(has_display());
}
