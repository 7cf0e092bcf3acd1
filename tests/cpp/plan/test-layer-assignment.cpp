// SPDX-License-Identifier: MIT
#include "plan/memory-budget.h"

#include <doctest/doctest.h>

using namespace hobbit;

using layers = std::vector<uint32_t>;

static constexpr uint64_t GiB = uint64_t(1) << 30;

static std::vector<std::optional<uint32_t>> loose(size_t n) {
    return std::vector<std::optional<uint32_t>>(n);
}

TEST_CASE("layers that no device was given go to all in runs, in proportion to what is free") {
    CHECK(assign_layers(loose(6), { 8 * GiB, 8 * GiB }) == layers{ 0, 0, 0, 1, 1, 1 });
    CHECK(assign_layers(loose(6), { 8 * GiB, 4 * GiB }) == layers{ 0, 0, 0, 0, 1, 1 });
    CHECK(assign_layers(loose(4), { GiB, 2 * GiB, GiB }) == layers{ 0, 1, 1, 2 });
    CHECK(assign_layers(loose(2), { 8 * GiB, 8 * GiB - 1 }) == layers{ 0, 1 });
}

TEST_CASE("a device that has nothing free gets nothing, and where none says what it has all get as many") {
    CHECK(assign_layers(loose(3), { 0, GiB }) == layers{ 1, 1, 1 });
    CHECK(assign_layers(loose(3), { GiB, 0 }) == layers{ 0, 0, 0 });
    CHECK(assign_layers(loose(4), { 0, 0 }) == layers{ 0, 0, 1, 1 });
}

TEST_CASE("a layer stays on the device that it was given, and only the others are spread") {
    const std::vector<std::optional<uint32_t>> all_given = { 1, 0, 1 };
    CHECK(assign_layers(all_given, { GiB, GiB }) == layers{ 1, 0, 1 });
    const std::vector<std::optional<uint32_t>> last_given = { {}, {}, {}, {}, 0, 1 };
    CHECK(assign_layers(last_given, { GiB, GiB }) == layers{ 0, 0, 1, 1, 0, 1 });
}

TEST_CASE("one device has all layers") {
    CHECK(assign_layers(loose(3), { 0 }) == layers{ 0, 0, 0 });
    CHECK(assign_layers(loose(0), { GiB }).empty());
}
