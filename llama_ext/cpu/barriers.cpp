// SPDX-License-Identifier: MIT
#include "ggml-impl.h"

#include <algorithm>

// The kernels of these operations divide rows among threads: thread 0 computes a single row alone.
static bool is_of_first_thread(const ggml_tensor * node) {
    const ggml_op op = node->op;
    return (op == GGML_OP_ADD || op == GGML_OP_SUB || op == GGML_OP_MUL || op == GGML_OP_DIV || op == GGML_OP_SCALE ||
            op == GGML_OP_CLAMP || op == GGML_OP_RMS_NORM || op == GGML_OP_SOFT_MAX || op == GGML_OP_SUM_ROWS ||
            op == GGML_OP_ARGSORT) &&
           ggml_nrows(node->src[0]) == 1;
}

// Do threads wait for each other between node i and what is computed next? They need not where thread 0 computes both.
extern "C" bool ggml_cpu_needs_barrier(const ggml_cgraph * graph, int i) {
    const auto is_computed = [](const ggml_tensor * node) {
        return !ggml_op_is_empty(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE);
    };
    ggml_tensor ** end  = graph->nodes + graph->n_nodes;
    ggml_tensor ** next = std::find_if(graph->nodes + i + 1, end, is_computed);
    return next == end || !is_of_first_thread(graph->nodes[i]) || !is_of_first_thread(*next);
}
