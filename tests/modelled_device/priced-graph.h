// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-impl.h"
#include "modelled-device.h"
#include "virtual-clock.h"

#include <set>

namespace modelled {

// Costs of a graph: kernels as CUDA's backend starts them, with its fusions, and bytes of weights that they read.
struct graph_price {
    uint64_t n_kernels = 0;
    uint64_t bytes     = 0;
};

inline bool computes_nothing(const ggml_tensor * t) {
    return ggml_is_empty(t) || t->op == GGML_OP_NONE || t->op == GGML_OP_VIEW || t->op == GGML_OP_RESHAPE ||
           t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

// Bytes of the weights that a product reads; MUL_MAT_ID reads the experts that its ids name.
inline uint64_t weight_bytes(const ggml_tensor * t) {
    if (t->op == GGML_OP_MUL_MAT) {
        return ggml_nbytes(t->src[0]);
    }
    if (t->op != GGML_OP_MUL_MAT_ID) {
        return 0;
    }
    std::set<int32_t> experts;
    for (int64_t n = 0; n < ggml_nelements(t->src[2]); n++) {
        experts.insert(expert_at(t->src[2], n));
    }
    const ggml_tensor * w = t->src[0];
    return experts.size() * uint64_t(w->ne[1]) * ggml_row_size(w->type, w->ne[0]);
}

// Kernels of a node that the ones before it have not computed along. `last` is the operation before it.
inline uint64_t kernels_of(const ggml_tensor * t, const ggml_tensor * last) {
    const ggml_op before = last ? last->op : GGML_OP_NONE;
    switch (t->op) {
        case GGML_OP_MUL_MAT: // a kernel quantizes the input
            return ggml_is_quantized(t->src[0]->type) ? 2 : 1;
        case GGML_OP_MUL_MAT_ID: // gate and up of a token are one
            return before == GGML_OP_MUL_MAT_ID && last->src[1] == t->src[1] && t->ne[2] == 1 ? 0 : 2;
        case GGML_OP_GLU: return before == GGML_OP_MUL_MAT_ID && t->ne[2] == 1 ? 0 : 1;
        case GGML_OP_MUL: return before == GGML_OP_RMS_NORM ? 0 : 1;
        case GGML_OP_ADD: // the sum over experts is one
            return before == GGML_OP_MUL || before == GGML_OP_ADD ? 0 : 1;
        case GGML_OP_ARGSORT: // the whole choice of experts is one
        case GGML_OP_TOP_K:
        case GGML_OP_GET_ROWS:
        case GGML_OP_SUM_ROWS:
        case GGML_OP_CLAMP:
        case GGML_OP_DIV:
            return before == GGML_OP_SOFT_MAX || before == GGML_OP_ARGSORT || before == GGML_OP_TOP_K ||
                           before == GGML_OP_GET_ROWS || before == GGML_OP_SUM_ROWS || before == GGML_OP_CLAMP
                       ? 0
                       : 1;
        case GGML_OP_SET_ROWS:       return before == GGML_OP_ROPE ? 0 : 1;
        case GGML_OP_FLASH_ATTN_EXT: return 2;
        default:                     return 1;
    }
}

inline graph_price price_of(const ggml_cgraph * graph) {
    graph_price         p;
    const ggml_tensor * last = nullptr;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * t = graph->nodes[i];
        if (computes_nothing(t) || !(t->flags & GGML_TENSOR_FLAG_COMPUTE)) {
            continue;
        }
        p.n_kernels += kernels_of(t, last);
        p.bytes     += weight_bytes(t);
        last         = t;
    }
    return p;
}

} // namespace modelled
