// SPDX-License-Identifier: MIT
#include "base/status.h"

#include <doctest/doctest.h>
#include <string>

using namespace hobbit;

TEST_CASE("a status is a success unless it says what failed") {
    CHECK(status().ok());
    CHECK(status().message().empty());
    const status s = status::error("no disk");
    CHECK_FALSE(s.ok());
    CHECK(s.message() == "no disk");
}

TEST_CASE("format is printf of any length") {
    CHECK(format("%s has %d of %5.1f", "a", 7, 2.25) == "a has 7 of   2.2");
    CHECK(format("nothing") == "nothing");
    CHECK(format("%s", "").empty());
    const std::string long_text(100000, 'x');
    CHECK(format("%s!", long_text.c_str()) == long_text + "!");
}

TEST_CASE("sizes are told in the unit that fits") {
    CHECK(format_size(1.5 * 1024 * 1024 * 1024) == "1.50 GiB");
    CHECK(format_size(16.0 * 1024 * 1024) == "16.0 MiB");
}
