// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml.h"
#include "graph/inner-graph.h"
#include "model/expert.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// Matmuls over experts of one layer that can run together: gate and up, or down.
struct stage {
    std::vector<const ggml_tensor *> matmuls;
    part_set                         parts;
};

// The stage that begins with the matmul at node `first`. Sets `end` to the node behind it.
stage next_stage(ggml_cgraph * graph, int first, int & end);

// The nodes [first, end) of an outer graph. They belong to one layer, and the first one is a matmul over experts.
struct layer_section {
    ggml_cgraph * graph = nullptr;
    int           first = 0;
    int           end   = 0;
    part_set      parts = {}; // parts of its matmuls
};

// The section that begins with the matmul at node `first`. It ends with the graph, or at the next matmul of another
// layer or of a part that the section has already.
layer_section section_at(ggml_cgraph * graph, int first);

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
