// SPDX-License-Identifier: MIT
#include "base/files.h"

#include <cerrno>
#include <doctest/doctest.h>
#include <sys/resource.h>

using namespace hobbit;

static rlim_t soft_limit() {
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    return limit.rlim_cur;
}

TEST_CASE("the soft limit of open files rises as far as it has to, and no further than the hard one") {
    rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 300;
    limit.rlim_max = 1500;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    allow_open_files(40);
    CHECK(soft_limit() == 300);
    allow_open_files(600);
    CHECK(soft_limit() >= 600);
    CHECK(soft_limit() < 1000);
    allow_open_files(9000);
    CHECK(soft_limit() == 1500);
}

TEST_CASE("too many open files have a remedy") {
    CHECK(open_failure(EMFILE).find("ulimit -n") != std::string::npos);
    CHECK(open_failure(EACCES).find("ulimit") == std::string::npos);
}
