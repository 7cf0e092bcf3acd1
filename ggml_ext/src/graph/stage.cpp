// SPDX-License-Identifier: MIT
#include "graph/stage.h"

#include "graph/expert-matmul.h"
#include "graph/inner-graph.h"

#include <algorithm>

namespace hobbit {

// Addresses identify a tensor within its buffer only: with Vulkan every buffer begins at the same address.
static bool depends_on(const ggml_tensor * tensor, const ggml_tensor * other) {
    const auto buffer_of = [](const ggml_tensor * t) { return t->view_src ? t->view_src->buffer : t->buffer; };
    return tensor->view_src == other || (tensor->data == other->data && buffer_of(tensor) == buffer_of(other));
}

// Gate and up share their input; a matmul that reads the output of another one begins a new stage.
stage next_stage(ggml_cgraph * graph, int first, int & end) {
    stage s;
    for (end = first; end < ggml_graph_n_nodes(graph); end++) {
        const ggml_tensor * node = ggml_graph_node(graph, end);
        if (is_noop(node)) {
            continue;
        }
        const bool joins = node->op == GGML_OP_MUL_MAT_ID && !(s.parts & expert_of(node).part) &&
                           std::none_of(s.matmuls.begin(), s.matmuls.end(), [&](const ggml_tensor * m) {
                               return m->src[2] != node->src[2] || depends_on(node->src[1], m);
                           });
        if (!joins) {
            break;
        }
        s.matmuls.push_back(node);
        s.parts |= expert_of(node).part;
    }
    return s;
}

layer_section section_at(ggml_cgraph * graph, int first) {
    const layer_id layer   = expert_of(ggml_graph_node(graph, first)).layer;
    layer_section  section = { graph, first, first };
    for (; section.end < ggml_graph_n_nodes(graph); section.end++) {
        const ggml_tensor * node = ggml_graph_node(graph, section.end);
        if (node->op != GGML_OP_MUL_MAT_ID || is_noop(node)) {
            continue;
        }
        if (expert_of(node).layer != layer || (section.parts & expert_of(node).part)) {
            break;
        }
        section.parts |= expert_of(node).part;
    }
    return section;
}

} // namespace hobbit
