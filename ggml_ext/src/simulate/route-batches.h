// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit-simulation.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace hobbit {

// Routes of a token in a layer.
inline uint32_t n_used_in(const hobbit_simulation & options, int32_t layer) {
    return options.n_used_by_layer ? options.n_used_by_layer[layer] : options.n_used;
}

// Consecutive routes: those of tokens that ran through the layers together.
struct route_batch {
    size_t                      first = 0;
    size_t                      last  = 0;     // past the end
    std::map<int32_t, uint32_t> n_tokens;      // [sequence]
    std::map<int32_t, uint32_t> numbers;       // [sequence] the policy's number for it
    std::vector<int32_t>        begins;        // sequences that begin with this batch
    uint32_t                    n_counted = 0; // tokens
};

// Divides recorded routes into batches; see struct hobbit_route. A new batch begins when the layer number decreases. It
// also begins with a sequence's next token if that token or the one before is counted: counted tokens are decoded one
// at a time. Routes outside the model are errors, and so are tokens with layers or experts out of order. Pure.
//
// From its first to its last batch a sequence has the smallest number that is free, like a server's slots.
status find_batches(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options,
                    std::vector<route_batch> & batches);

} // namespace hobbit
