// SPDX-License-Identifier: MIT
#include "fixtures/temp-dir.h"
#include "io/file-reader.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

// This program's own pread and posix_fadvise stand in for the C library's.

static std::deque<int>     g_outcomes; // outcomes of the next reads: an error number, or 0 and a read of one block
static std::vector<size_t> g_sizes;    // that were asked for
static int                 g_n_dropped;

static std::function<void()> g_after_read; // once

extern "C" ssize_t pread(int fd, void * buf, size_t size, off_t offset) {
    g_sizes.push_back(size);
    if (!g_outcomes.empty()) {
        const int outcome = g_outcomes.front();
        g_outcomes.pop_front();
        if (outcome != 0) {
            errno = outcome;
            return -1;
        }
        size = hobbit::file_reader::alignment;
    }
    const ssize_t n = syscall(SYS_pread64, fd, buf, size, offset);
    if (g_after_read) {
        std::exchange(g_after_read, nullptr)();
    }
    return n;
}

extern "C" int posix_fadvise(int, off_t, off_t, int advice) {
    g_n_dropped += advice == POSIX_FADV_DONTNEED;
    return 0;
}

using namespace hobbit;

static constexpr size_t BLOCK = file_reader::alignment;

namespace {

struct free_deleter {
    void operator()(void * p) const { free(p); }
};

// A file of four blocks.
struct opened_file {
    temp_dir          dir;
    std::string       bytes;
    posix_file_reader reader;
    bool              was_direct;

    std::unique_ptr<char, free_deleter> buf{ static_cast<char *>(aligned_alloc(BLOCK, 4 * BLOCK)) };

    opened_file() {
        for (size_t i = 0; i < 4 * BLOCK; i++) {
            bytes += char(i * 31 + i / BLOCK);
        }
        REQUIRE(reader.open(dir.write("file", bytes)).ok());
        was_direct  = reader.direct_io();
        g_n_dropped = 0;
        g_sizes.clear();
    }

    status read(std::deque<int> outcomes) {
        g_outcomes = std::move(outcomes);
        memset(buf.get(), 0, 4 * BLOCK);
        return reader.read_at(0, 0, 4 * BLOCK, 4 * BLOCK, buf.get());
    }

    bool has_all() const { return memcmp(buf.get(), bytes.data(), 4 * BLOCK) == 0; }
};

} // namespace

TEST_CASE("a read that a signal interrupts is tried again") {
    opened_file f;
    CHECK(f.read({ EINTR, EINTR }).ok());
    CHECK(f.has_all());
    CHECK(g_sizes == std::vector<size_t>(3, 4 * BLOCK));
    CHECK(f.reader.direct_io() == f.was_direct);
}

TEST_CASE("short reads go on where they ended") {
    opened_file f;
    CHECK(f.read({ 0, EINTR, 0 }).ok());
    CHECK(f.has_all());
    CHECK(g_sizes == std::vector<size_t>{ 4 * BLOCK, 3 * BLOCK, 3 * BLOCK, 2 * BLOCK });
}

TEST_CASE("an error of the disk names the file") {
    opened_file  f;
    const status s = f.read({ 0, EIO });
    REQUIRE_FALSE(s.ok());
    CHECK(s.message() == "cannot read '" + f.dir.path("file") + "': Input/output error");
    CHECK(f.read({}).ok());
}

TEST_CASE("a file that changes during a read is an error of that read") {
    opened_file f;
    g_after_read   = [&] { std::filesystem::resize_file(f.dir.path("file"), 8 * BLOCK); };
    const status s = f.read({});
    CHECK(s.message().find("changed while it was in use") != std::string::npos);
}

TEST_CASE("a file system that refuses direct I/O late is read through the page cache, which is emptied") {
    opened_file f;
    REQUIRE(f.was_direct);
    CHECK(f.read({}).ok());
    CHECK(g_n_dropped == 0);
    CHECK(f.read({ EINVAL }).ok());
    CHECK(f.has_all());
    CHECK_FALSE(f.reader.direct_io());
    CHECK(g_n_dropped == 1);
    CHECK(f.read({}).ok());
    CHECK(g_n_dropped == 2);
    CHECK_FALSE(f.read({ EINVAL }).ok()); // no reason is left
}
