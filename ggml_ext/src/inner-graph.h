// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Scratch memory of inner graphs on the compute device. An operation may use all of it, since a graph's operations run
// one after the other; the row numbers must keep their place until the graph has run.
struct scratch_sizes {
    size_t gathered = 0; // bytes: most rows of an expert times its widest input
    size_t product  = 0; // bytes: most rows of an expert times its widest output
    size_t rows     = 0; // row numbers in one graph
};

// Collects operations on tensors of an outer graph and runs them, in the order given, as a graph of its own on the
// compute device. The outer tensors take part as leaf copies (same memory and shape, no history): the originals would
// drag the whole model's graph along.
//
// Thread-safety: none.
class inner_graph {
  public:
    // `backend` must outlive the graph.
    explicit inner_graph(ggml_backend_t backend);
    ~inner_graph();

    inner_graph(const inner_graph &)             = delete;
    inner_graph & operator=(const inner_graph &) = delete;

    ggml_backend_t backend() const { return backend_; }

    // Grows the scratch memory if it is smaller; false when the device has no room. REQUIRES: empty(), to grow.
    bool reserve(const scratch_sizes & sizes);

    bool empty() const { return n_nodes_ == 0; }

    // Whether it must be computed before anything is added.
    bool full() const;

    // Repeats an operation of the outer graph, into the same memory.
    void add_copy(const ggml_tensor * node);

    // A contiguous weight matrix in the memory of the compute device.
    struct matrix {
        ggml_type             type;
        int64_t               n_in;
        int64_t               n_out;
        char *                data;
        ggml_backend_buffer_t buffer;
    };

    // Row dst_rows[i] of dst = weight x row src_rows[i] of src. Both are float tensors of the outer graph, their rows
    // numbered through the higher dimensions; dst's operation parameters (the precision) apply.
    // One row is computed in place, as llama.cpp does; several are gathered, multiplied and scattered.
    // REQUIRES: the rows of each tensor are evenly spaced; reserve() allowed for them.
    void add_product(const matrix & weight, const ggml_tensor * src, const std::vector<int32_t> & src_rows,
                     const ggml_tensor * dst, const std::vector<int32_t> & dst_rows);

    // Row numbers that add_product keeps for each row.
    static constexpr size_t row_numbers_per_row = 3;

    // Runs what was added and empties the graph.
    ggml_status compute();

    // Forgets what was added.
    void reset();

  private:
    ggml_tensor * leaf(const ggml_tensor * tensor);
    ggml_tensor * matrix_leaf(const matrix & m);
    ggml_tensor * rows_leaf(const ggml_tensor * tensor, int64_t first, int64_t n);
    ggml_tensor * row_numbers(const std::vector<int32_t> & rows);
    void          place(ggml_tensor * tensor, size_t scratch_offset);
    void          add_node(ggml_tensor * node);

    ggml_backend_t        backend_;
    ggml_context *        ctx_     = nullptr; // owned
    ggml_cgraph *         graph_   = nullptr; // in ctx_
    ggml_backend_buffer_t scratch_ = nullptr; // owned
    scratch_sizes         sizes_;
    size_t                n_nodes_   = 0;
    size_t                n_leaves_  = 0;
    size_t                rows_used_ = 0;
};

} // namespace hobbit
