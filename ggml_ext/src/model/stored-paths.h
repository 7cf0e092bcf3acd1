// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// An entry of the activation paths that a calibration stores (docs/format.md): of n_tokens that chose `now` in the
// layer before `layer`, and `before` in the one before that, how many chose each of some experts in `layer`. Without
// `before` it is of all tokens that chose the one expert in `now`, and without either of all tokens.
struct stored_path {
    uint32_t        layer;
    uint8_t         n_tokens; // at least 1
    const int32_t * now;
    size_t          n_now;
    const int32_t * before;
    size_t          n_before;
    const int32_t * next; // 256 times the expert, and its tokens, of which there are at most n_tokens
    size_t          n_next;
};

using path_visit = std::function<void(const stored_path &)>;

// Calls visit for each entry in the values of hobbit.paths. Returns false, perhaps after some, where they are damaged
// or name experts that a model lacks. n_experts: [layer]
bool each_path(const std::vector<int32_t> & values, const std::vector<uint32_t> & n_experts, const path_visit & visit);

} // namespace hobbit
