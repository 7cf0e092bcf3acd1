// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"
#include "model/expert.h"

#include <vector>

// How the nodes of an outer graph belong together. A node is a matmul over experts if it is a MUL_MAT_ID; see
// expert_of.

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

} // namespace hobbit
