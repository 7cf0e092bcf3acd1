// SPDX-License-Identifier: MIT
#include "plan/layer-assignment.h"

#include <algorithm>
#include <numeric>

namespace hobbit {

std::vector<uint32_t> assign_layers(const std::vector<std::optional<uint32_t>> & given,
                                    const std::vector<uint64_t> &                free) {
    std::vector<double> ends(free.begin(), free.end());
    if (std::all_of(free.begin(), free.end(), [](uint64_t bytes) { return bytes == 0; })) {
        ends.assign(free.size(), 1.0);
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());

    const auto            n_loose = double(std::count(given.begin(), given.end(), std::nullopt));
    std::vector<uint32_t> spread;
    double                n_spread = 0.0;
    for (const std::optional<uint32_t> & device : given) {
        if (device) {
            spread.push_back(*device);
            continue;
        }
        const double middle = ends.back() * (n_spread + 0.5) / n_loose;
        spread.push_back(uint32_t(std::upper_bound(ends.begin(), ends.end(), middle) - ends.begin()));
        n_spread += 1.0;
    }
    return spread;
}

} // namespace hobbit
