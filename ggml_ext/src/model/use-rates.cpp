// SPDX-License-Identifier: MIT
#include "model/use-rates.h"

#include "model/expert-index.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

expert_table<float> use_rates(const expert_index & index) {
    const std::vector<int32_t> & counts = index.calibration().uses;
    if (std::all_of(counts.begin(), counts.end(), [](int32_t n) { return n == 0; })) {
        return {};
    }
    const uint32_t      n_experts = index.n_experts();
    expert_table<float> rates(index.n_layers(), n_experts);
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        const auto    first  = counts.begin() + ptrdiff_t(size_t(layer) * n_experts);
        const int64_t sum    = std::accumulate(first, first + n_experts, int64_t(0));
        const auto    n_used = float(std::max(1u, index.layer(layer).n_used));
        for (uint32_t e = 0; e < n_experts && sum > 0; e++) {
            rates[{ layer, e }] = float(first[e]) * n_used / float(sum);
        }
    }
    return rates;
}

std::vector<expert_id> most_used(const expert_table<float> & rates) {
    std::vector<expert_id> used;
    for (size_t i = 0; i < rates.size(); i++) {
        if (rates[rates.id(i)] > 0) {
            used.push_back(rates.id(i));
        }
    }
    std::stable_sort(used.begin(), used.end(), [&](expert_id a, expert_id b) { return rates[a] > rates[b]; });
    return used;
}

} // namespace hobbit
