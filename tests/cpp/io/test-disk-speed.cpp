// SPDX-License-Identifier: MIT
#include "fixtures/check-contains.h"
#include "fixtures/temp-dir.h"
#include "hobbit.h"

#include <doctest/doctest.h>
#include <fstream>
#include <string>
#include <sys/resource.h>
#include <unistd.h>

static constexpr uint64_t FILE_SIZE = 1 << 20;

static std::string measure(const std::string & path, uint32_t n_threads, hobbit_disk_speed & speed,
                           double seconds = 0.05) {
    char       err[512] = "";
    const bool is_ok    = hobbit_measure_disk(path.c_str(), 64 << 10, n_threads, seconds, &speed, err, sizeof(err));
    CHECK(is_ok == (*err == '\0'));
    return err;
}

TEST_CASE("the speed of several threads is measured, and a small or missing file is an error") {
    const temp_dir    dir;
    hobbit_disk_speed speed;
    dir.write("file", std::string(FILE_SIZE, 'x'));
    CHECK(measure(dir.path("file"), 4, speed) == "");
    CHECK(speed.bytes_per_s > 0);
    CHECK(measure(dir.path("file"), 4, speed, 0.0) == ""); // all threads start too late
    CHECK(speed.bytes_per_s > 0);
    dir.write("small", "x");
    const std::string small   = measure(dir.path("small"), 4, speed);
    const std::string missing = measure(dir.path("missing"), 4, speed);
    CHECK_CONTAINS(small, "is too small to measure the disk with");
    CHECK_CONTAINS(missing, "No such file");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // they need address space themselves
TEST_CASE("threads that cannot start are an error") {
    const temp_dir dir;
    dir.write("file", std::string(FILE_SIZE, 'x'));
    std::ifstream statm("/proc/self/statm");
    rlim_t        pages = 0;
    rlimit        before;
    REQUIRE(bool(statm >> pages));
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    const rlimit few = { pages * rlim_t(sysconf(_SC_PAGESIZE)) + (200u << 20), before.rlim_max };
    REQUIRE(setrlimit(RLIMIT_AS, &few) == 0);
    hobbit_disk_speed speed;
    const std::string error = measure(dir.path("file"), 1000, speed); // their stacks take more
    setrlimit(RLIMIT_AS, &before);
    CHECK_CONTAINS(error, "cannot measure the disk: ");
    CHECK(speed.bytes_per_s == 0);
}
#endif
