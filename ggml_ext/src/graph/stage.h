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

// The end of the section that begins with the matmul at node `first`: that of the graph, or the next matmul of another
// layer or of a part that the section has already. Sets `parts` to the section's parts.
int section_end(ggml_cgraph * graph, int first, part_set & parts);

} // namespace hobbit
