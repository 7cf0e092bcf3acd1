// SPDX-License-Identifier: MIT
// The value that an error of JSON names is the one that has the wrong type, or none.
#include "json.h"

#include <doctest/doctest.h>

#include <string>

namespace {

// The error of get<std::string>(), "" without one.
std::string error_of(const common_json & value) {
    try {
        value.get<std::string>();
    } catch (const common_json_error & e) {
        return e.what();
    }
    return "";
}

const std::string PLAIN = "type must be string, but is number";

} // namespace

TEST_CASE("an error names the value that was just looked up") {
    const common_json body = common_json::parse(R"({"first": 1, "second": 2})");
    CHECK(error_of(body.at("first")) == PLAIN + " (near 'first')");
    CHECK(error_of(body.at("second")) == PLAIN + " (near 'second')");
}

TEST_CASE("an error of another value does not name the one that was looked up") {
    const common_json body  = common_json::parse(R"({"first": 1, "second": 2, "list": [3]})");
    const auto &      first = body.at("first");
    const auto &      other = body.at("second");
    CHECK(error_of(first) == PLAIN);
    CHECK(error_of(other) == PLAIN); // another value was asked for its text meanwhile

    for (const common_json & each : body.at("list")) {
        CHECK(error_of(each) == PLAIN);
    }
    for (const auto & item : body.items()) {
        if (item.key() != "list") {
            CHECK(error_of(item.value()) == PLAIN);
        }
    }
}

TEST_CASE("an error does not name a value of an earlier text") {
    CHECK(common_json::parse(R"({"earlier": 1})").at("earlier").is_number());
    CHECK(error_of(common_json::parse("[2]").at(0)) == PLAIN);
    CHECK(error_of(common_json(3)) == PLAIN);
}
