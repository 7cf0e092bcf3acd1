// SPDX-License-Identifier: MIT
#include "io/file-reader.h"

#include "fixtures/temp-dir.h"

#include <cstdlib>
#include <cstring>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <memory>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace hobbit;

static constexpr size_t BLOCK = file_reader::alignment;

struct free_deleter {
    void operator()(void * p) const { free(p); }
};

using aligned_memory = std::unique_ptr<char, free_deleter>;

static aligned_memory aligned(size_t size) {
    return aligned_memory(static_cast<char *>(aligned_alloc(BLOCK, size)));
}

// Bytes of which no two blocks are alike.
static std::string pattern(size_t size) {
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size; i++) {
        bytes[i] = char(i * 31 + i / BLOCK);
    }
    return bytes;
}

static bool contains(const status & s, const std::string & text) {
    return s.message().find(text) != std::string::npos;
}

TEST_CASE("reads aligned ranges of the right file") {
    temp_dir          dir;
    const std::string first  = pattern(8 * BLOCK);
    const std::string second = std::string(2 * BLOCK, 'x');
    posix_file_reader reader;
    REQUIRE(reader.open(dir.write("first", first)).ok());
    REQUIRE(reader.open(dir.write("second", second)).ok());

    const aligned_memory buf = aligned(4 * BLOCK);
    CHECK(reader.read_at(0, 3 * BLOCK, 4 * BLOCK, 4 * BLOCK, buf.get()).ok());
    CHECK(memcmp(buf.get(), first.data() + 3 * BLOCK, 4 * BLOCK) == 0);
    CHECK(reader.read_at(1, BLOCK, BLOCK, BLOCK, buf.get()).ok());
    CHECK(memcmp(buf.get(), second.data() + BLOCK, BLOCK) == 0);
}

TEST_CASE("reads the tail of a file that ends within a block") {
    temp_dir          dir;
    const std::string bytes = pattern(2 * BLOCK + 100);
    posix_file_reader reader;
    REQUIRE(reader.open(dir.write("file", bytes)).ok());

    const aligned_memory buf = aligned(2 * BLOCK);
    CHECK(reader.read_at(0, BLOCK, 2 * BLOCK, BLOCK + 100, buf.get()).ok());
    CHECK(memcmp(buf.get(), bytes.data() + BLOCK, BLOCK + 100) == 0);
}

TEST_CASE("a file that ends before what is needed is an error that names file and place") {
    temp_dir          dir;
    posix_file_reader reader;
    const std::string path = dir.write("short", pattern(BLOCK + 100));
    REQUIRE(reader.open(path).ok());

    const aligned_memory buf = aligned(2 * BLOCK);
    const status         s   = reader.read_at(0, 0, 2 * BLOCK, BLOCK + 101, buf.get());
    REQUIRE_FALSE(s.ok());
    CHECK(contains(s, path));
    CHECK(contains(s, "ends at byte 4196"));
    CHECK(contains(s, "truncated"));
}

TEST_CASE("a missing file is an error of open") {
    temp_dir          dir;
    posix_file_reader reader;
    const status      s = reader.open(dir.path("nowhere"));
    REQUIRE_FALSE(s.ok());
    CHECK(contains(s, "cannot open"));
    CHECK(contains(s, "nowhere"));
    CHECK(contains(s, "No such file"));
}

TEST_CASE("a file that changes while open is an error of the next read") {
    temp_dir             dir;
    const std::string    path = dir.write("file", pattern(2 * BLOCK));
    const aligned_memory buf  = aligned(BLOCK);
    posix_file_reader    reader;
    REQUIRE(reader.open(path).ok());
    REQUIRE(reader.read_at(0, 0, BLOCK, BLOCK, buf.get()).ok());

    SUBCASE("longer") {
        std::ofstream(path, std::ios::app) << "more";
    }
    SUBCASE("shorter") {
        std::filesystem::resize_file(path, BLOCK + 1);
    }
    SUBCASE("same size, another time") {
        const auto before = std::filesystem::last_write_time(path);
        std::filesystem::last_write_time(path, before + std::chrono::seconds(1));
    }
    const status s = reader.read_at(0, 0, BLOCK, BLOCK, buf.get());
    REQUIRE_FALSE(s.ok());
    CHECK(contains(s, path));
    CHECK(contains(s, "changed while it was in use"));
}

TEST_CASE("a descriptor that the program closes is no change of the file") {
    temp_dir             dir;
    const std::string    path = dir.write("file", pattern(2 * BLOCK));
    const aligned_memory buf  = aligned(BLOCK);
    posix_file_reader    reader;
    const int            own = dup(0); // the next one
    close(own);
    REQUIRE(reader.open(path).ok());
    close(own);
    const status closed = reader.read_at(0, 0, BLOCK, BLOCK, buf.get());
    CHECK(contains(closed, "this program closed the descriptor by which '" + path));

    // another file's of the same size and time
    const std::string other = dir.write("other", std::string(2 * BLOCK, 'x'));
    std::filesystem::last_write_time(other, std::filesystem::last_write_time(path));
    REQUIRE(open(other.c_str(), O_RDONLY) == own);
    const status reused = reader.read_at(0, 0, BLOCK, BLOCK, buf.get());
    CHECK(contains(reused, "this program closed the descriptor"));
}

TEST_CASE("a file in the place of an open one is noticed, a removed one is not an error") {
    temp_dir          dir;
    posix_file_reader reader;
    const std::string path = dir.write("model", pattern(BLOCK));
    REQUIRE(reader.open(path).ok());
    CHECK(reader.check_in_place().ok());
    dir.write("other", pattern(BLOCK));
    REQUIRE(rename(dir.path("other").c_str(), path.c_str()) == 0);
    CHECK(contains(reader.check_in_place(), "was replaced while it was opened"));
    REQUIRE(unlink(path.c_str()) == 0);
    CHECK(reader.check_in_place().ok());
}

TEST_CASE("a file that is replaced by another of the same name is still read") {
    temp_dir          dir;
    const std::string bytes = pattern(BLOCK);
    posix_file_reader reader;
    REQUIRE(reader.open(dir.write("file", bytes)).ok());
    std::filesystem::rename(dir.write("other", std::string(BLOCK, 'x')), dir.path("file"));

    const aligned_memory buf = aligned(BLOCK);
    CHECK(reader.read_at(0, 0, BLOCK, BLOCK, buf.get()).ok());
    CHECK(memcmp(buf.get(), bytes.data(), BLOCK) == 0);
}

// A file system in memory has no direct I/O on most kernels: the buffered way must give the same bytes.
TEST_CASE("reads a file system in memory, with or without direct I/O" *
          doctest::skip(!std::filesystem::exists("/dev/shm"))) {
    std::string path = "/dev/shm/hobbit-test-XXXXXX";
    const int   fd   = mkstemp(path.data());
    REQUIRE(fd >= 0);
    const std::string bytes = pattern(2 * BLOCK + 7);
    std::ofstream(path, std::ios::binary) << bytes;

    posix_file_reader    reader;
    const aligned_memory buf    = aligned(3 * BLOCK);
    const bool           opened = reader.open(path).ok();
    const bool           read   = opened && reader.read_at(0, 0, 3 * BLOCK, bytes.size(), buf.get()).ok();
    close(fd);
    std::filesystem::remove(path);
    REQUIRE(read);
    CHECK(memcmp(buf.get(), bytes.data(), bytes.size()) == 0);
}

TEST_CASE("many threads read at once") {
    temp_dir          dir;
    const std::string bytes = pattern(64 * BLOCK);
    posix_file_reader reader;
    REQUIRE(reader.open(dir.write("file", bytes)).ok());

    std::vector<size_t>      wrong(4, 0);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < wrong.size(); t++) {
        threads.emplace_back([&, t] {
            const aligned_memory buf = aligned(BLOCK);
            for (size_t i = 0; i < 64; i++) {
                const size_t block  = (i * 7 + t * 13) % 64;
                const bool   ok     = reader.read_at(0, block * BLOCK, BLOCK, BLOCK, buf.get()).ok();
                wrong[t]           += !ok || memcmp(buf.get(), bytes.data() + block * BLOCK, BLOCK) != 0;
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    CHECK(wrong == std::vector<size_t>(4, 0));
}
