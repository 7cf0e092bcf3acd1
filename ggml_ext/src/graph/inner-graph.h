// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"
#include "ggml.h"

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace hobbit {

// Returns true if a backend has nothing to compute for the node.
inline bool is_noop(const ggml_tensor * node) {
    return !(node->flags & GGML_TENSOR_FLAG_COMPUTE) || ggml_op_is_empty(node->op);
}

// The tensor that a view shows, or the tensor itself: both are in the buffer of this one.
inline const ggml_tensor * root_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// A leaf whose rows lie in this buffer.
inline ggml_tensor * rows_at(ggml_context * ctx, ggml_type type, int64_t width, int64_t n_rows, size_t stride,
                             void * data, ggml_backend_buffer_t buffer) {
    ggml_tensor * t = ggml_new_tensor_2d(ctx, type, width, n_rows);
    t->nb[1]        = stride;
    t->nb[2] = t->nb[3] = stride * size_t(n_rows);
    t->data             = data;
    t->buffer           = buffer;
    return t;
}

// Equal weight matrices, evenly spaced in the memory of the compute device.
struct matrices {
    ggml_type             type;
    int64_t               n_in;
    int64_t               n_out;
    char *                data;   // address of matrix number 0
    size_t                stride; // bytes
    int32_t               count;  // matrices from number 0 on that lie in the buffer
    ggml_backend_buffer_t buffer;
};

// A row of a matmul over experts, numbered rank + token * n_used, and the number of the matrix that computes it.
struct served_row {
    int32_t row;
    int32_t matrix;
};

// Settings of the caller of an outer graph.
struct caller_settings {
    int                 n_threads  = 0;       // threads of the CPU's backend; 0: not set
    ggml_abort_callback abort      = nullptr; // null: it never ends early
    void *              abort_data = nullptr;
};

// Collects operations on tensors of an outer graph and runs them, in the order given, as a separate graph on the
// compute device. Outer tensors take part as leaf copies (same memory and shape, no sources), since the originals would
// pull in the whole model's graph.
//
// Numbers and values that the operations need from host memory are staged in page-locked memory, if the driver has any.
// They go to the device in one asynchronous copy for each launch, to places that no running operation uses.
//
// Thread-safety: none.
class inner_graph {
  public:
    // `backend` must outlive the computations. in_queue: whoever reads the results does so behind them in its queue.
    // `caller` must outlive the graph; null: nobody knows.
    explicit inner_graph(ggml_backend_t backend, bool in_queue = false, const caller_settings * caller = nullptr);
    ~inner_graph();

    inner_graph(const inner_graph &)             = delete;
    inner_graph & operator=(const inner_graph &) = delete;

    ggml_backend_t backend() const { return backend_; }
    bool           in_queue() const { return in_queue_; }

    // Puts what is added next at places of the layer's own: a backend that captures graphs knows one again whose
    // tensors are as they were. Without a shared queue it does nothing. REQUIRES: can_begin_layer()
    void begin_layer(uint32_t layer);
    bool can_begin_layer(uint32_t layer) const { return idle() || (empty() && layer != page_); }

    // Threads that the backend computes with; 0: unknown.
    int n_threads() const { return caller_ ? caller_->n_threads : 0; }

    // Returns true if the caller of the outer graph wants it to end; devices do not ask by themselves.
    bool is_aborted() const { return caller_ && caller_->abort && caller_->abort(caller_->abort_data); }

    // Sizes of the scratch memory on the compute device. Operations run one after the other, so each may use all of it.
    // Only row numbers and values have a place of their own until the graph has run.
    struct scratch_sizes {
        size_t gathered = 0; // bytes of input rows
        size_t product  = 0; // bytes of output rows
        size_t rows     = 0; // row numbers in one graph
        size_t values   = 0; // bytes of rows from host memory, with their numbers, in one graph

        bool fits(const scratch_sizes & room) const {
            return gathered <= room.gathered && product <= room.product && rows <= room.rows && values <= room.values;
        }
    };

    const scratch_sizes & scratch() const { return sizes_; }

    // Grows the scratch memory to at least these sizes; false if the device has no room. REQUIRES: empty() if it grows.
    bool reserve(const scratch_sizes & sizes);

    bool empty() const { return ggml_graph_n_nodes(graph_) == 0; }

    // Returns true if nothing was added and nothing is running.
    bool idle() const { return empty() && !is_running_; }

    // Returns true if the graph must be computed before so many operations are added.
    bool full(size_t n = 1) const;

    // Adds a copy of an operation of the outer graph, with the same result memory.
    void add_copy(const ggml_tensor * node);

    // Computes rows of an outer MUL_MAT_ID from other weights, with the same kernel: in place if these are all of its
    // rows, or of few tokens on the CPU; else they are gathered, multiplied and scattered. REQUIRES: the scratch memory
    // has room for it; each row occurs once; rows of one matrix are adjacent; outer tensors have evenly spaced rows.
    void add_matmul(const ggml_tensor * matmul, const matrices & weights, const std::vector<served_row> & rows);

    // Returns true if no token has two rows of a matrix: kernels for packed layouts have a place for one. REQUIRES:
    // rows of one matrix are adjacent, in the order of tokens
    static bool are_distinct(const ggml_tensor * matmul, const std::vector<served_row> & rows);

    // Computes all rows of a token's MUL_MAT_ID with matrices whose numbers the device has, as add_look_up() returns
    // them: it looks the ids up in the table, and leaves the numbers in the memory of `to`.
    void          add_matmul(const ggml_tensor * matmul, const matrices & weights, ggml_tensor * numbers);
    ggml_tensor * add_look_up(const ggml_tensor * table, const ggml_tensor * ids, const ggml_tensor * to);

    // Adds a copy of adjacent rows to the given rows of an outer tensor. Both are in the device's memory.
    void add_scatter(const ggml_tensor * tensor, const ggml_tensor * from, const std::vector<int32_t> & rows);

    // Numbers that are in the device's memory while the graph runs.
    ggml_tensor * row_numbers(const std::vector<int32_t> & rows, int64_t n_columns = 1);

    // Row numbers that add_matmul stores for each row.
    static constexpr size_t row_numbers_per_row = 3;

    // Enough rows for an operation to be efficient.
    static constexpr int64_t enough_rows = 64;

    // ggml's kernels keep a table for each matrix that a matmul spans, used or not, with an entry for each row (in
    // packed layouts, for each token). This bounds the tables of one matmul, so that they stay small beside the pools.
    // A single matrix may exceed it, but needs no more than in llama.cpp.
    static constexpr size_t max_work_size = 8u << 20;
    static size_t           work_size(size_t n_matrices, size_t n_places) { return n_matrices * (n_places + 1) * 8; }

    // Writes adjacent rows of host memory, or zeros without `values`, to the given rows of an outer tensor. Runs what
    // was added if the scratch memory has no room for more. REQUIRES: it has room for one row of values.
    status add_rows(const ggml_tensor * tensor, const float * values, const std::vector<int32_t> & rows);

    // Copies outer tensors to host memory, with one wait for all, and for all that is running. REQUIRES: they are
    // computed, or will be behind what is running. The bytes are valid until the next call. On a device with events
    // `meanwhile` is called before the wait, which does not wait for what it launches. REQUIRES: it stages nothing, and
    // the graph is empty() before it and after it
    std::vector<const char *> read(const std::vector<const ggml_tensor *> & tensors,
                                   const std::function<void()> &            meanwhile = nullptr);

    // Starts the added operations behind those that are running, and empties the graph. The caller leaves their
    // operands and results alone until compute().
    status launch();

    // Runs the added operations, waits for all that are running and empties the graph.
    status compute();

    // Runs the added operations, and waits for them only if nothing in the backend's queue does.
    status finish() { return in_queue_ ? launch() : compute(); }

    // Drops the added operations, and waits for those that are running.
    void reset();

    // Counts launches, waits, reads and copies here, and shows the added operations in the timeline. The counters must
    // outlive the graph.
    void record(stats & in) { stats_ = &in; }

    // Counts a copy or a clear that the caller made.
    void count_copy(size_t n_bytes);

    // While measuring is on, launch() waits for the end and adds its duration to measured().
    void                     measure(bool on) { is_measured_ = on; }
    std::chrono::nanoseconds measured() const { return measured_; }

  private:
    // The numbers of the first and the last matrix that an operation spans.
    struct matrix_span {
        int32_t first;
        int32_t last;
    };

    // Memory of a graph and its tensors.
    struct page {
        std::unique_ptr<char[]> memory; // ggml_init aborts if its own allocation fails
        ggml_context_ptr        ctx;
    };

    // Bytes that are copied to host memory at once.
    struct span_copy {
        ggml_backend_buffer_t            buffer;
        char *                           begin;
        char *                           end;
        const char *                     name;
        std::vector<const ggml_tensor *> tensors = {};
        size_t                           offset  = 0; // offset of the copies

        size_t size() const { return size_t(end - begin); }
    };

    static std::vector<span_copy> copies_of(const std::vector<const ggml_tensor *> & tensors);

    void count(stats::counter stats::* of, uint64_t n = 1) {
        if (stats_) {
            stats_->*of += n;
        }
    }

    matrix_span   span_of(const matrices & weights, const std::vector<served_row> & rows) const;
    ggml_tensor * leaf(const ggml_tensor * tensor);
    ggml_tensor * operand(const ggml_tensor * tensor);
    ggml_tensor * matrices_leaf(const matrices & weights, const matrix_span & span);
    ggml_tensor * rows_leaf(const ggml_tensor * tensor);
    char *        stage(ggml_tensor * tensor);
    void          copy_staged();
    ggml_tensor * bytes_at(ggml_backend_buffer_t buffer, void * data, size_t size, const char * name);
    ggml_tensor * multiply(const ggml_tensor * matmul, ggml_tensor * weights, ggml_tensor * src, ggml_tensor * ids);
    ggml_tensor * multiply_all(const ggml_tensor * matmul, const matrices & weights,
                               const std::vector<served_row> & rows);
    ggml_tensor * multiply_some(const ggml_tensor * matmul, const matrices & weights,
                                const std::vector<served_row> & rows, ggml_tensor *& to);
    void          add_product(const ggml_tensor * matmul, ggml_tensor * product);
    void          scatter(const ggml_tensor * matmul, ggml_tensor * rows, ggml_tensor * to);
    ggml_tensor * reshape(ggml_tensor * tensor, int64_t ne0, int64_t ne1, int64_t ne2);
    size_t        padded(size_t size) const { return (size + alignment_ - 1) / alignment_ * alignment_; }
    size_t        product_offset() const { return padded(sizes_.gathered); }
    size_t        staged_offset() const { return product_offset() + padded(sizes_.product) + alignment_; }
    size_t        staged_room(const scratch_sizes & sizes) const;
    void          place(ggml_tensor * tensor, size_t scratch_offset);
    void          add_node(ggml_tensor * node);
    static void   allocate(page & p, size_t size);
    void          open_page(uint32_t number);
    void          begin_graph();
    void          forget_staged() { n_sets_ = n_values_ = n_staged_ = n_copied_ = 0; }

    ggml_backend_t           backend_;
    const bool               in_queue_;
    const caller_settings *  caller_;
    const size_t             alignment_; // alignment of tensors on the device
    std::map<uint32_t, page> pages_;
    uint32_t                 page_ = 0;       // number of the current one
    ggml_context *           ctx_  = nullptr; // context of the current page
    page                     staged_;         // holds one tensor
    // what the graph has for outer tensors, and for row numbers in so many columns
    std::map<const ggml_tensor *, ggml_tensor *>                      operands_;
    std::map<std::pair<int64_t, std::vector<int32_t>>, ggml_tensor *> numbers_;

    ggml_cgraph *           graph_ = nullptr; // in ctx_
    ggml_backend_buffer_ptr scratch_;
    scratch_sizes           sizes_;
    // including operations that are running: a backend may look at their tensors until it is synchronized
    size_t n_nodes_     = 0;
    size_t n_leaves_    = 0;
    size_t n_sets_      = 0; // sets of staged numbers or values
    size_t n_values_    = 0; // bytes of rows from host memory, with their numbers
    bool   is_running_  = false;
    bool   is_measured_ = false;

    ggml_backend_buffer_ptr  staging_;      // host memory, an image of the end of the scratch memory
    size_t                   n_staged_ = 0; // bytes of it that are in use
    size_t                   n_copied_ = 0; // bytes of it that were copied to the device
    ggml_backend_buffer_ptr  inbox_;        // host memory of read()
    ggml_backend_event_ptr   copied_;       // its copies have ended; null: not made, or the device has no events
    std::chrono::nanoseconds measured_{ 0 };
    stats *                  stats_ = nullptr; // null: nobody counts
};

} // namespace hobbit
