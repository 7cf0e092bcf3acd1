// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml.h"
#include "graph/inner-graph.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// A tensor, and its bytes in host memory.
struct host_copy {
    const ggml_tensor * tensor = nullptr; // null: none
    std::vector<char>   bytes;
};

// Reads which experts the router chose for a MUL_MAT_ID over experts, and their weights from src[3]. The weights stay
// empty if src[3] is missing or has another shape. Fails if an id is not an expert.
// `input`, if not null, gets the matmul's input, and *more the address of the bytes of another tensor, if `also` names
// one; all are read in the same wait. `inner` counts the copies. For `meanwhile` see inner_graph::read.
// Thread-safety: different graphs may be read at once.
status read_routing(const ggml_tensor * matmul, layer_id layer, layer_routing & routing, inner_graph & inner,
                    host_copy * input, const ggml_tensor * also = nullptr, const char ** more = nullptr,
                    const std::function<void()> & meanwhile = nullptr);

} // namespace hobbit
