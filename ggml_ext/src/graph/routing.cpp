// SPDX-License-Identifier: MIT
#include "graph/routing.h"

#include "graph/expert-matmul.h"

namespace hobbit {

// Addresses identify a tensor within its buffer only: with Vulkan every buffer begins at the same address.
static bool depends_on(const ggml_tensor * tensor, const ggml_tensor * other) {
    return tensor->view_src == other ||
           (tensor->data == other->data && root_of(tensor)->buffer == root_of(other)->buffer);
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

size_t n_row_sources(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_MUL:
        case GGML_OP_GLU:        return node->src[1] ? 2 : 1;
        case GGML_OP_ADD_ID:
        case GGML_OP_CLAMP:
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_SCALE:
        case GGML_OP_SQR:
        case GGML_OP_UNARY:      return 1;
        default:                 return 0;
    }
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

status read_routing(const ggml_tensor * matmul, layer_id layer, layer_routing & routing, inner_graph & inner,
                    host_copy * input, const ggml_tensor * also, const char ** more,
                    const std::function<void()> & meanwhile) {
    const ggml_tensor * ids       = matmul->src[2];
    const ggml_tensor * weights   = matmul->src[3];
    const int32_t       n_experts = int32_t(matmul->src[0]->ne[2]);
    const bool has_weights = weights && ggml_is_contiguous(weights) && ggml_nelements(weights) == ggml_nelements(ids);

    std::vector<const ggml_tensor *> wanted = { ids };
    if (has_weights) {
        wanted.push_back(weights);
    }
    if (input) {
        wanted.push_back(matmul->src[1]);
    }
    if (also) {
        wanted.push_back(also);
    }
    const std::vector<const char *> bytes = inner.read(wanted, meanwhile);

    routing.layer    = layer;
    routing.n_used   = ids->ne[0];
    routing.n_tokens = ids->ne[1];
    for (int64_t t = 0; t < routing.n_tokens; t++) {
        for (int64_t k = 0; k < routing.n_used; k++) {
            int32_t id;
            std::memcpy(&id, bytes[0] + t * ids->nb[1] + k * ids->nb[0], sizeof(id));
            if (id < 0 || id >= n_experts) {
                return status::error("the router chose expert %d of %d in '%s': the device that computed it "
                                     "is lost or broken",
                                     id, n_experts, matmul->src[0]->name);
            }
            routing.experts.push_back(id);
        }
    }
    if (has_weights) {
        routing.weights.resize(routing.experts.size());
        std::memcpy(routing.weights.data(), bytes[1], routing.weights.size() * sizeof(float));
    }
    if (input) {
        input->tensor   = matmul->src[1];
        const char * at = bytes[has_weights ? 2 : 1];
        input->bytes.assign(at, at + ggml_nbytes(input->tensor));
    }
    if (also) {
        *more = bytes.back();
    }
    return {};
}

} // namespace hobbit
