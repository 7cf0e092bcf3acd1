// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace hobbit {

// Routes of tokens that ran through the layers together. They lie side by side.
struct route_batch {
    size_t                      first = 0;
    size_t                      last  = 0;     // past the end
    std::map<int32_t, uint32_t> n_tokens;      // [sequence]
    std::map<int32_t, uint32_t> numbers;       // [sequence] by which the policy knows it
    std::vector<int32_t>        begins;        // sequences that were not in an earlier batch
    uint32_t                    n_counted = 0; // tokens
};

// Finds the batches of recorded routes, see struct hobbit_route. A batch ends where the layer goes back, or where a
// sequence has a further token and one of the two is counted: those are decoded, one at a time.
// Routes outside the model and a token whose layers or experts are not in order are errors. Pure.
//
// A sequence has the smallest number that is free between its first and its last batch, like a server's slots.
status find_batches(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options,
                    std::vector<route_batch> & batches);

} // namespace hobbit
