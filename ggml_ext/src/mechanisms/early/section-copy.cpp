// SPDX-License-Identifier: MIT
#include "mechanisms/early/section-copy.h"

#include <cstring>

namespace hobbit {

section_copy::section_copy(const layer_section & section) {
    const size_t n = size_t(section.end - section.first);
    ctx_.reset(ggml_init({ 3 * n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr,
                           /* .no_alloc = */ true }));
    graph_ = ggml_new_graph_custom(ctx_.get(), n, false);
    for (int i = section.first; i < section.end; i++) {
        copies_[ggml_graph_node(section.graph, i)] = nullptr;
    }
    for (int i = section.first; i < section.end; i++) {
        ggml_graph_add_node(graph_, copy(ggml_graph_node(section.graph, i)));
    }
}

std::unique_ptr<section_copy> section_copy::make(const layer_section & section) {
    std::unique_ptr<section_copy> made(new section_copy(section));
    const ggml_tensor *           input = made->input_;
    const bool                    is_row =
        made->n_inputs_ == 1 && input->type == GGML_TYPE_F32 && ggml_nrows(input) == 1 && ggml_is_contiguous(input);
    return is_row ? std::move(made) : nullptr;
}

ggml_tensor * section_copy::duplicate(const ggml_tensor * t) {
    ggml_tensor * same = ggml_new_tensor(ctx_.get(), t->type, GGML_MAX_DIMS, t->ne);
    std::memcpy(same->nb, t->nb, sizeof(same->nb));
    return copies_[t] = same;
}

ggml_tensor * section_copy::copy(const ggml_tensor * node) {
    if (copies_[node]) {
        return copies_[node];
    }
    ggml_tensor * same = duplicate(node);
    same->op           = node->op;
    same->flags        = node->flags;
    std::memcpy(same->op_params, node->op_params, sizeof(same->op_params));
    if (node->view_src) {
        same->view_src  = source(node->view_src);
        same->view_offs = node->view_offs;
    }
    const bool is_matmul = node->op == GGML_OP_MUL_MAT_ID;
    const bool is_bias   = node->op == GGML_OP_ADD_ID;
    for (int i = 0; i < (is_matmul ? 3 : GGML_MAX_SRC); i++) {
        if (is_matmul && i == 0) {
            same->src[i] = weights(node->src[i]);
        } else if (is_bias && i == 1) {
            same->src[i] = node->src[i]; // the model's
        } else if (node->src[i]) {
            same->src[i] = (is_matmul || is_bias) && i == 2 ? ids(node->src[i]) : source(node->src[i]);
        }
    }
    return same;
}

// The copy has no buffer: its `extra` names layer and part.
ggml_tensor * section_copy::weights(const ggml_tensor * t) {
    ggml_tensor * same = duplicate(t);
    same->extra        = t->extra;
    return same;
}

// The experts that compute are set anew each time.
ggml_tensor * section_copy::ids(const ggml_tensor * t) {
    return copies_.count(t) > 0 ? copies_[t] : duplicate(t);
}

ggml_tensor * section_copy::source(const ggml_tensor * t) {
    const auto found = copies_.find(t);
    if (found != copies_.end()) {
        return found->second ? found->second : copy(t);
    }
    n_inputs_++;
    return input_ = duplicate(t);
}

} // namespace hobbit
