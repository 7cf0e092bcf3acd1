// SPDX-License-Identifier: MIT
#include "mechanisms/replacement/replacement.h"

#include <algorithm>
#include <set>

namespace hobbit {

std::vector<int32_t> replace_missing(const rule_input & in, const std::vector<int32_t> & ranking,
                                     std::vector<precision> & precisions) {
    const layer_routing & routing   = in.routing;
    const size_t          n_used    = size_t(routing.n_used);
    const size_t          n_experts = ranking.size() / size_t(routing.n_tokens);
    std::vector<int32_t>  served    = routing.experts;
    const auto            is_held   = [&](int32_t expert, tier_id tier) {
        return (tier == tier_id::high || in.has_low) && in.is_resident({ routing.layer, uint32_t(expert) }, tier);
    };

    std::vector<size_t> others; // missing selections but the best of each token
    std::set<int32_t>   fetched;
    for (size_t first = 0; first < served.size(); first += n_used) {
        bool is_best = true;
        for (size_t i = first; i < first + n_used; i++) {
            if (precisions[i] == precision::skip || is_held(served[i], tier_of(precisions[i]))) {
                continue;
            }
            if (is_best) {
                fetched.insert(served[i]);
            } else {
                others.push_back(i);
            }
            is_best = false;
        }
    }
    for (const size_t i : others) {
        const auto own    = served.begin() + ptrdiff_t(i / n_used * n_used);
        const auto best   = ranking.begin() + ptrdiff_t(i / n_used * n_experts);
        const auto end    = best + ptrdiff_t(n_experts);
        const auto serves = [&](int32_t expert) {
            return (is_held(expert, tier_id::high) || is_held(expert, tier_id::low)) &&
                   std::find(own, own + ptrdiff_t(n_used), expert) == own + ptrdiff_t(n_used);
        };
        const auto found = fetched.count(served[i]) > 0 ? end : std::find_if(best, end, serves);
        if (found != end) {
            served[i]     = *found;
            precisions[i] = is_held(*found, tier_id::high) ? precision::high : precision::low;
        }
    }
    return served;
}

} // namespace hobbit
