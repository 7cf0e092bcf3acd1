// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

namespace hobbit {

// A constant table of rows that have a `name` and a function `make`.

// What the row of that name makes; null if there is none.
template <typename Table, typename... Args>
auto make_named(const Table & table, const std::string & name, const Args &... args)
    -> decltype(table[0].make(args...)) {
    const auto row = std::find_if(std::begin(table), std::end(table), [&](const auto & r) { return name == r.name; });
    return row != std::end(table) ? row->make(args...) : nullptr;
}

template <typename Table>
std::vector<std::string> names_of(const Table & table) {
    std::vector<std::string> names;
    for (const auto & row : table) {
        names.push_back(row.name);
    }
    return names;
}

} // namespace hobbit
