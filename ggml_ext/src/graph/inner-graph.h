// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace hobbit {

// Nodes that a backend has nothing to do for.
bool is_noop(const ggml_tensor * node);

// Returns when the tensor, of four bytes or more, is computed on the backend's device, also where this synchronizes
// early (device_traits). REQUIRES: ggml_backend_synchronize(backend) was called.
void wait_until_computed(ggml_backend_t backend, const ggml_tensor * tensor);

// Equal weight matrices, evenly spaced in the memory of the compute device.
struct matrices {
    ggml_type             type;
    int64_t               n_in;
    int64_t               n_out;
    char *                data;   // of number 0, which need not exist
    size_t                stride; // bytes
    ggml_backend_buffer_t buffer;
};

// A row that a matmul over experts computes, numbered rank + token * n_used, and the number of the matrix that serves
// it.
struct served_row {
    int32_t row;
    int32_t matrix;
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

    // The scratch memory, on the compute device. An operation may use all of it, since a graph's operations run one
    // after the other; the row numbers must keep their place until the graph has run.
    struct scratch_sizes {
        size_t gathered = 0; // bytes of input rows
        size_t product  = 0; // bytes of output rows, twice where products are added to them
        size_t rows     = 0; // row numbers in one graph

        bool fits(const scratch_sizes & room) const {
            return gathered <= room.gathered && product <= room.product && rows <= room.rows;
        }
    };

    const scratch_sizes & scratch() const { return sizes_; }

    // Grows the scratch memory if it is smaller; false when the device has no room. REQUIRES: empty(), to grow.
    bool reserve(const scratch_sizes & sizes);

    bool empty() const { return ggml_graph_n_nodes(graph_) == 0; }

    // Whether it must be computed before anything is added.
    bool full() const;

    // Repeats an operation of the outer graph, into the same memory.
    void add_copy(const ggml_tensor * node);

    // Computes rows of an outer MUL_MAT_ID from other weights, in the kernel that computes it outside. All of its rows
    // are computed in place; some are gathered, multiplied and scattered, for which the scratch memory must have room.
    // REQUIRES: each row once; a matrix's rows one after the other; the rows of the outer tensors are evenly spaced.
    void add_matmul(const ggml_tensor * matmul, const matrices & weights, const std::vector<served_row> & rows);

    // The same, added to what the rows hold when the operation begins. The scratch memory must have room in any case.
    void add_to_matmul(const ggml_tensor * matmul, const matrices & weights, const std::vector<served_row> & rows);

    // Row numbers that add_matmul or add_to_matmul keeps for each row.
    static constexpr size_t row_numbers_per_row = 3;

    // Rows that are worth an operation of their own.
    static constexpr int64_t enough_rows = 64;

    // ggml's kernels keep a table for each matrix that a matmul spans, used or not, with a place for each row, or in
    // packed layouts for each token: what one matmul should be given at most, beside a small share of the pools. A
    // single matrix is always within it, or no more than llama.cpp asks for.
    static constexpr size_t max_work_size = 8u << 20;
    static size_t           work_size(size_t n_matrices, size_t n_places) { return n_matrices * (n_places + 1) * 8; }

    // Sets rows of an outer tensor to those that stand one after the other in host memory. REQUIRES: nothing was added
    // and nothing is running, and the scratch memory has room for them as a product.
    void add_rows(const ggml_tensor * tensor, const float * values, const std::vector<int32_t> & rows);

    // Begins to run what was added, after what is running, and empties the graph. Nobody else touches what it reads and
    // writes until compute().
    status launch();

    // Runs what was added, waits for the end and empties the graph.
    status compute();

    // Forgets what was added, and ends what is running.
    void reset();

    // While it is measured, what is begun is waited for, and how long that took is added up.
    void                     measure(bool on) { is_measured_ = on; }
    std::chrono::nanoseconds measured() const { return measured_; }

  private:
    // The number of the first matrix that an operation spans, and that of the last.
    struct matrix_span {
        int32_t first;
        int32_t last;
    };

    matrix_span   span_of(const matrices & weights, const std::vector<served_row> & rows) const;
    ggml_tensor * leaf(const ggml_tensor * tensor);
    ggml_tensor * matrices_leaf(const matrices & weights, const matrix_span & span);
    ggml_tensor * rows_leaf(const ggml_tensor * tensor);
    ggml_tensor * row_numbers(const std::vector<int32_t> & rows);
    void          set_row_numbers();
    ggml_tensor * multiply(const ggml_tensor * matmul, ggml_tensor * weights, ggml_tensor * src, ggml_tensor * ids);
    ggml_tensor * multiply_all(const ggml_tensor * matmul, const matrices & weights,
                               const std::vector<served_row> & rows);
    ggml_tensor * multiply_some(const ggml_tensor * matmul, const matrices & weights,
                                const std::vector<served_row> & rows, ggml_tensor *& to);
    void          scatter(const ggml_tensor * matmul, ggml_tensor * rows, ggml_tensor * to);
    ggml_tensor * reshape(ggml_tensor * tensor, int64_t ne0, int64_t ne1, int64_t ne2);
    size_t        padded(size_t size) const { return (size + alignment_ - 1) / alignment_ * alignment_; }
    size_t        product_offset() const { return padded(sizes_.gathered); }
    size_t        rows_offset() const { return product_offset() + padded(sizes_.product) + alignment_; }
    void          place(ggml_tensor * tensor, size_t scratch_offset);
    void          add_node(ggml_tensor * node);
    void          begin_graph();
    status        check(ggml_status result) const;

    ggml_backend_t        backend_;
    const size_t          alignment_;         // of whatever is a tensor on the device
    ggml_context *        ctx_     = nullptr; // owned
    ggml_cgraph *         graph_   = nullptr; // in ctx_
    ggml_backend_buffer_t scratch_ = nullptr; // owned
    scratch_sizes         sizes_;
    // also of what is running: a backend may look at its tensors until it is synchronized
    size_t n_nodes_     = 0;
    size_t n_leaves_    = 0;
    size_t n_row_sets_  = 0; // in the scratch memory
    bool   is_running_  = false;
    bool   is_measured_ = false;

    std::vector<char>        row_numbers_; // as they lie in the scratch memory
    size_t                   n_set_ = 0;   // bytes of them that are there
    std::chrono::nanoseconds measured_{ 0 };
};

} // namespace hobbit
