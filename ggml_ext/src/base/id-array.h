// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>

namespace hobbit {

// An array of N that is indexed by an enum class alone.
template <typename Id, typename T, size_t N>
struct id_array : std::array<T, N> {
    constexpr T &       operator[](Id id) { return std::array<T, N>::operator[](size_t(id)); }
    constexpr const T & operator[](Id id) const { return std::array<T, N>::operator[](size_t(id)); }
};

} // namespace hobbit
