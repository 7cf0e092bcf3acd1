// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Indices of the k largest, best first: the first of equal ones first and NaN last. REQUIRES: k <= keys.size()
std::vector<int32_t> top_k(std::vector<float> keys, size_t k);

} // namespace hobbit
