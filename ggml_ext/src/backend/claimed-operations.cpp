// SPDX-License-Identifier: MIT
#include "backend/ggml-hobbit.h"
#include "graph/routing.h"

#include <cstring>

namespace hobbit {

static bool is_on_disk(const ggml_tensor * weights) {
    return weights->buffer && ggml_backend_buft_is_hobbit(weights->buffer->buft);
}

bool is_expert_matmul(const ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT_ID && is_on_disk(op->src[0]);
}

// The token embedding, before the first layer, is a split of its own.
bool is_row_lookup(const ggml_tensor * op) {
    return op->op == GGML_OP_GET_ROWS && is_on_disk(op->src[0]);
}

// Looks up by name, not `extra`: a model loaded to measure memory alone has tensors of this type without memory.
static bool is_down(const ggml_tensor * matmul) {
    const auto *          runner = (const split_runner *) matmul->src[0]->buffer->buft->context;
    const expert_tensor * expert = runner->find_tensor(matmul->src[0]->name);
    return expert && expert->part == part_id::down;
}

static bool is_elementwise(const ggml_tensor * op) {
    return op->op == GGML_OP_RESHAPE || op->op == GGML_OP_VIEW ||
           (op->op != GGML_OP_MUL_MAT_ID && n_row_sources(op) > 0);
}

const ggml_tensor * find_matmul(const ggml_tensor * tensor, int depth) {
    if (is_expert_matmul(tensor)) {
        return tensor;
    }
    if (depth == 0 || !is_elementwise(tensor)) {
        return nullptr;
    }
    const ggml_tensor * found = find_matmul(tensor->src[0], depth - 1);
    return found || !tensor->src[1] ? found : find_matmul(tensor->src[1], depth - 1);
}

// The look-up of per-expert scales (blk.N.PART_exps.scale) for the selected experts.
static bool is_scale_lookup(const ggml_tensor * op) {
    if (op->op != GGML_OP_GET_ROWS && op->op != GGML_OP_REPEAT) {
        return false;
    }
    const ggml_tensor * tensor = op;
    while (tensor->op == GGML_OP_GET_ROWS || tensor->op == GGML_OP_REPEAT || tensor->op == GGML_OP_RESHAPE) {
        tensor = tensor->src[0];
    }
    return tensor->op == GGML_OP_NONE && std::strstr(tensor->name, "_exps.scale");
}

bool is_of_device(const ggml_tensor * weights, ggml_backend_dev_t dev) {
    return weights->buffer->buft->device == dev;
}

bool is_between_matmuls(const ggml_tensor * op, ggml_backend_dev_t dev) {
    if (is_scale_lookup(op)) {
        return true;
    }
    const ggml_tensor * matmul = is_elementwise(op) ? find_matmul(op) : nullptr;
    if (!matmul || !is_of_device(matmul->src[0], dev)) {
        return false;
    }
    if (!is_down(matmul)) {
        return true;
    }
    return op->op == GGML_OP_ADD_ID || (op->op == GGML_OP_MUL && is_scale_lookup(op->src[1]));
}

} // namespace hobbit
