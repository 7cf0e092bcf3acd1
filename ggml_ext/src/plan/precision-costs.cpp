// SPDX-License-Identifier: MIT
#include "plan/precision-costs.h"

#include <algorithm>
#include <utility>

namespace hobbit {

status precision_costs::set(std::vector<float> low, std::vector<float> skip, uint32_t n_layers, uint32_t n_experts) {
    const size_t n_all = size_t(n_layers) * n_experts;
    if (low.size() != skip.size() || (low.size() != n_layers && low.size() != n_all)) {
        return status::error("there are %zu costs of low precision and %zu of skipping: give one of each for "
                             "every layer (%u) or for every expert (%zu)",
                             low.size(), skip.size(), n_layers, n_all);
    }
    const auto is_wrong = [](float cost) { return !(cost >= 0.0f); }; // also NaN
    if (std::any_of(low.begin(), low.end(), is_wrong) || std::any_of(skip.begin(), skip.end(), is_wrong)) {
        return status::error("a cost of low precision or of skipping is negative or NaN: costs are 0 or more");
    }
    n_per_layer_ = low.size() / n_layers;
    low_         = std::move(low);
    skip_        = std::move(skip);
    return {};
}

} // namespace hobbit
