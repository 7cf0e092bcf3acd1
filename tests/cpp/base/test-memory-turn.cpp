// SPDX-License-Identifier: MIT
#include "base/memory-turn.h"
#include "base/page-commit.h"
#include "base/system-memory.h"
#include "fixtures/fake-machine.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace hobbit;

static constexpr auto NOW   = std::chrono::milliseconds(0);
static constexpr auto LATER = std::chrono::seconds(60);

// Another program's lock.
struct other_turn {
    other_turn() : file(open(meminfo_path().c_str(), O_RDONLY)), is_locked(flock(file, LOCK_EX | LOCK_NB) == 0) {}

    ~other_turn() { close(file); }

    other_turn(const other_turn &)             = delete;
    other_turn & operator=(const other_turn &) = delete;

    const int  file;
    const bool is_locked;
};

TEST_CASE("only one program has its turn") {
    const fake_machine machine(1 << 30);
    {
        const other_turn other;
        REQUIRE(other.is_locked);
        CHECK(memory_turn::take(NOW) == nullptr);
        CHECK(memory_turn::current() == nullptr);
    }
    const auto turn = memory_turn::take(NOW);
    REQUIRE(turn != nullptr);
    CHECK(!other_turn().is_locked);
}

TEST_CASE("who does not wait any longer has a turn beside the other one's") {
    const fake_machine machine(1 << 30);
    other_turn         other;
    REQUIRE(other.is_locked);
    auto turn = memory_turn::take(NOW, true);
    REQUIRE(turn != nullptr);
    CHECK(memory_turn::take(NOW) == turn);
    turn.reset();
    CHECK(memory_turn::take(NOW) == nullptr);
    CHECK(!other_turn().is_locked);
}

TEST_CASE("a turn begins when the other program's ends") {
    const fake_machine machine(1 << 30);
    auto               other = std::make_unique<other_turn>();
    std::thread        ends([&] { other.reset(); });
    CHECK(memory_turn::take(LATER) != nullptr);
    ends.join();
}

TEST_CASE("a process has one turn, which lasts as long as one of its holders") {
    const fake_machine machine(1 << 30);
    auto               first  = memory_turn::take(NOW);
    auto               second = memory_turn::take(NOW);
    CHECK(first == second);
    CHECK(memory_turn::current() == first);
    first.reset();
    CHECK(!other_turn().is_locked);
    second.reset();
    CHECK(memory_turn::current() == nullptr);
    CHECK(other_turn().is_locked);
}

TEST_CASE("it lasts until the pages are taken") {
    const fake_machine machine(1 << 30);
    auto               turn   = memory_turn::take(NOW);
    const auto         size   = size_t(sysconf(_SC_PAGESIZE));
    void *             memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    std::filesystem::remove(meminfo_path());
    REQUIRE(mkfifo(meminfo_path().c_str(), 0600) == 0); // whoever looks for memory waits for a writer
    page_commit commit;
    commit.start({ { static_cast<char *>(memory), size } }, 1);
    turn.reset();
    CHECK(memory_turn::current() != nullptr);
    std::ofstream(meminfo_path()) << "MemAvailable: 9999 kB\n";
    commit.wait();
    CHECK(memory_turn::current() == nullptr);
    munmap(memory, size);
}

TEST_CASE("a child of fork() does not keep the turn, nor end it") {
    const fake_machine machine(1 << 30);
    auto               turn  = memory_turn::take(NOW);
    const pid_t        child = fork();
    if (child == 0) {
        turn.reset();
        _exit(0);
    }
    REQUIRE(waitpid(child, nullptr, 0) == child);
    CHECK(!other_turn().is_locked);
    turn.reset();
    CHECK(other_turn().is_locked);
}

TEST_CASE("without the file nobody waits") {
    const fake_machine machine(1 << 30);
    std::filesystem::remove(meminfo_path());
    CHECK(memory_turn::take(LATER) != nullptr);
}
