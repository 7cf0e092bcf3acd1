// SPDX-License-Identifier: MIT
#include "inner-graph.h"

#include <algorithm>
#include <cstring>

namespace hobbit {

// Room in a graph. Its leaves are counted apart from its nodes; a call of add_* takes no more than the reserve of
// either.
static constexpr size_t GRAPH_SIZE = 8192;
static constexpr size_t RESERVE    = GGML_MAX_SRC;

inner_graph::inner_graph(ggml_backend_t backend) : backend_(backend) {
    const size_t     size   = 2 * GRAPH_SIZE * ggml_tensor_overhead() + ggml_graph_overhead_custom(GRAPH_SIZE, false);
    ggml_init_params params = { size, nullptr, /* .no_alloc = */ true };
    ctx_                    = ggml_init(params);
    reset();
}

inner_graph::~inner_graph() {
    ggml_backend_buffer_free(scratch_);
    ggml_free(ctx_);
}

void inner_graph::reset() {
    ggml_reset(ctx_);
    graph_     = ggml_new_graph_custom(ctx_, GRAPH_SIZE, false);
    n_nodes_   = 0;
    n_leaves_  = 0;
    rows_used_ = 0;
}

bool inner_graph::reserve(const scratch_sizes & sizes) {
    if (sizes.gathered <= sizes_.gathered && sizes.product <= sizes_.product && sizes.rows <= sizes_.rows) {
        return true;
    }
    GGML_ASSERT(empty());
    const scratch_sizes grown = { std::max(sizes.gathered, sizes_.gathered), std::max(sizes.product, sizes_.product),
                                  std::max(sizes.rows, sizes_.rows) };
    ggml_backend_buffer_free(scratch_);
    sizes_   = {};
    scratch_ = ggml_backend_alloc_buffer(backend_, grown.gathered + grown.product + grown.rows * sizeof(int32_t));
    if (!scratch_) {
        return false;
    }
    sizes_ = grown;
    return true;
}

bool inner_graph::full() const {
    return n_nodes_ + RESERVE > GRAPH_SIZE || n_leaves_ + RESERVE > GRAPH_SIZE;
}

//
// tensors
//

ggml_tensor * inner_graph::leaf(const ggml_tensor * tensor) {
    ggml_tensor * copy = ggml_new_tensor(ctx_, tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, copy->nb);
    copy->data   = tensor->data;
    copy->buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    n_leaves_++;
    return copy;
}

ggml_tensor * inner_graph::matrix_leaf(const matrix & m) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx_, m.type, m.n_in, m.n_out);
    t->data         = m.data;
    t->buffer       = m.buffer;
    n_leaves_++;
    return t;
}

// All rows of a float tensor, or `n` of them from `first` on.
ggml_tensor * inner_graph::rows_leaf(const ggml_tensor * tensor, int64_t first, int64_t n) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx_, tensor->type, tensor->ne[0], n);
    t->nb[1]        = tensor->nb[1];
    t->nb[2] = t->nb[3] = t->nb[1] * n;
    t->data             = static_cast<char *>(tensor->data) + first * tensor->nb[1];
    t->buffer           = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
    n_leaves_++;
    return t;
}

ggml_tensor * inner_graph::row_numbers(const std::vector<int32_t> & rows) {
    GGML_ASSERT(rows_used_ + rows.size() <= sizes_.rows);
    ggml_tensor * t = ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, rows.size());
    place(t, sizes_.gathered + sizes_.product + rows_used_ * sizeof(int32_t));
    ggml_backend_tensor_set(t, rows.data(), 0, rows.size() * sizeof(int32_t));
    rows_used_ += rows.size();
    n_leaves_++;
    return t;
}

void inner_graph::place(ggml_tensor * tensor, size_t scratch_offset) {
    tensor->data   = static_cast<char *>(ggml_backend_buffer_get_base(scratch_)) + scratch_offset;
    tensor->buffer = scratch_;
}

void inner_graph::add_node(ggml_tensor * node) {
    ggml_build_forward_expand(graph_, node);
    n_nodes_ = ggml_graph_n_nodes(graph_);
}

//
// operations
//

void inner_graph::add_copy(const ggml_tensor * node) {
    ggml_tensor * copy = leaf(node);
    copy->op           = node->op;
    std::memcpy(copy->op_params, node->op_params, sizeof(copy->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        copy->src[i] = node->src[i] ? leaf(node->src[i]) : nullptr;
    }
    add_node(copy);
}

static bool rows_are_even(const ggml_tensor * t) {
    return (t->ne[2] == 1 || t->nb[2] == t->ne[1] * t->nb[1]) && (t->ne[3] == 1 || t->nb[3] == t->ne[2] * t->nb[2]);
}

void inner_graph::add_product(const matrix & weight, const ggml_tensor * src, const std::vector<int32_t> & src_rows,
                              const ggml_tensor * dst, const std::vector<int32_t> & dst_rows) {
    GGML_ASSERT(src_rows.size() == dst_rows.size() && rows_are_even(src) && rows_are_even(dst));
    GGML_ASSERT(src->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32);

    ggml_tensor * w = matrix_leaf(weight);
    if (src_rows.size() == 1) {
        ggml_tensor * product = ggml_mul_mat(ctx_, w, rows_leaf(src, src_rows[0], 1));
        std::memcpy(product->op_params, dst->op_params, sizeof(product->op_params));
        product->data   = static_cast<char *>(dst->data) + dst_rows[0] * dst->nb[1];
        product->buffer = dst->buffer;
        add_node(product);
        return;
    }

    // of the one matrix, as llama.cpp multiplies the rows of each expert: a MUL_MAT may take another kernel for many
    // rows
    const int64_t n        = int64_t(src_rows.size());
    ggml_tensor * gathered = ggml_get_rows(ctx_, rows_leaf(src, 0, ggml_nrows(src)), row_numbers(src_rows));
    place(gathered, 0);
    ggml_tensor * first   = ggml_reshape_2d(ctx_, row_numbers(std::vector<int32_t>(n, 0)), 1, n);
    ggml_tensor * product = ggml_mul_mat_id(ctx_, w, ggml_reshape_3d(ctx_, gathered, gathered->ne[0], 1, n), first);
    std::memcpy(product->op_params, dst->op_params, sizeof(product->op_params));
    place(product, sizes_.gathered);
    GGML_ASSERT(ggml_nbytes(gathered) <= sizes_.gathered && ggml_nbytes(product) <= sizes_.product);

    ggml_tensor * rows      = ggml_reshape_2d(ctx_, product, product->ne[0], n);
    ggml_tensor * scattered = ggml_set_rows(ctx_, rows_leaf(dst, 0, ggml_nrows(dst)), rows, row_numbers(dst_rows));
    scattered->buffer       = dst->buffer;
    add_node(scattered);
}

ggml_status inner_graph::compute() {
    if (empty()) {
        return GGML_STATUS_SUCCESS;
    }
    const ggml_status result = ggml_backend_graph_compute(backend_, graph_);
    reset();
    return result;
}

} // namespace hobbit
