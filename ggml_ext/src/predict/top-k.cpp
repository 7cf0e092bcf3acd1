// SPDX-License-Identifier: MIT
#include "predict/top-k.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hobbit {

std::vector<int32_t> top_k(std::vector<float> keys, size_t k) {
    std::replace_if(keys.begin(), keys.end(), [](float v) { return std::isnan(v); }, -INFINITY);
    std::vector<int32_t> order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + ptrdiff_t(k), order.end(), [&](int32_t a, int32_t b) {
        return keys[size_t(a)] != keys[size_t(b)] ? keys[size_t(a)] > keys[size_t(b)] : a < b;
    });
    order.resize(k);
    return order;
}

} // namespace hobbit
