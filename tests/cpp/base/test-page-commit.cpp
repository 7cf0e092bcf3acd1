// SPDX-License-Identifier: MIT
#include "base/page-commit.h"

#include <algorithm>
#include <cstring>
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace hobbit;

static const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));

// Memory that no page was taken for.
struct untouched_memory {
    explicit untouched_memory(size_t n) :
        n_pages(n),
        begin(
            static_cast<char *>(mmap(nullptr, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
        REQUIRE(begin != MAP_FAILED);
        madvise(begin, n_pages * PAGE, MADV_NOHUGEPAGE);
    }

    ~untouched_memory() { munmap(begin, n_pages * PAGE); }

    size_t n_resident() const {
        std::vector<unsigned char> pages(n_pages * (PAGE / 4096)); // qemu-user fills in the machine's smaller ones
        REQUIRE(mincore(begin, n_pages * PAGE, pages.data()) == 0);
        return size_t(std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return (page & 1) != 0; }));
    }

    page_commit::range range(size_t first, size_t n) const { return { begin + first * PAGE, n * PAGE }; }

    size_t n_pages;
    char * begin;
};

static bool kernel_can() {
    untouched_memory memory(1);
    return madvise(memory.begin, PAGE, 23) == 0;
}

TEST_CASE("all pages of the ranges are taken, and no other") {
    const untouched_memory memory(5000);
    page_commit            commit;
    commit.start({ memory.range(10, 4000), memory.range(4500, 100) });
    commit.wait();
    CHECK(memory.n_resident() == (kernel_can() ? 4100 : 0));
}

TEST_CASE("memory that is written meanwhile keeps its content") {
    const untouched_memory memory(5000);
    page_commit            commit;
    commit.start({ memory.range(0, 5000) });
    memset(memory.begin, 7, 5000 * PAGE);
    commit.wait();
    CHECK(std::all_of(memory.begin, memory.begin + 5000 * PAGE, [](char value) { return value == 7; }));
}

TEST_CASE("it can be ended early and started again") {
    const untouched_memory memory(5000);
    page_commit            commit;
    commit.end();
    for (int i = 0; i < 3; i++) {
        commit.start({ memory.range(0, 5000) });
        commit.end();
    }
    CHECK(memory.n_resident() <= 5000);
    commit.start({ memory.range(0, 5000) });
    commit.wait();
    CHECK(memory.n_resident() == (kernel_can() ? 5000 : 0));
}

TEST_CASE("memory that cannot be taken ends the thread quietly") {
    page_commit commit;
    {
        const untouched_memory gone(100);
        commit.start({ { gone.begin + 1, PAGE } }); // not a page's first byte
        commit.wait();
        CHECK(gone.n_resident() == 0);
    }
}

TEST_CASE("it stops where the system has too little left") {
    const untouched_memory memory(5000);
    page_commit            commit;
    commit.start({ memory.range(0, 5000) }, uint64_t(1) << 60);
    commit.wait();
    CHECK(memory.n_resident() == 0);
    commit.start({ memory.range(0, 5000) }, 1);
    commit.wait();
    CHECK(memory.n_resident() == (kernel_can() ? 5000 : 0));
}
