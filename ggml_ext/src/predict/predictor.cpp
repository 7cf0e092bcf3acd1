// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

#include <cmath>
#include <numeric>

namespace hobbit {

namespace {

const auto repeat = registered_predictor::of<repeat_predictor>("repeat", { "names the previous token's experts" });

} // namespace

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

void normalize(layer_routing & routing) {
    routing.weights.resize(routing.experts.size(), 1.0f); // equal ones where they are not known
    const size_t        n_used = size_t(routing.n_used);
    std::vector<double> normalized(n_used);
    for (size_t i = 0; i < routing.weights.size(); i += n_used) {
        normalize_weights(&routing.weights[i], n_used, normalized.data());
        std::copy(normalized.begin(), normalized.end(), routing.weights.begin() + ptrdiff_t(i));
    }
}

} // namespace hobbit
