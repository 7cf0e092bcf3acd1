// SPDX-License-Identifier: MIT
#include "graph/inner-graph.h"

#include "device/device-traits.h"
#include "plan/batch-info.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <optional>

namespace hobbit {

// The capacity of a graph for nodes, and for leaves. A call of add_* adds at most RESERVE of either.
static constexpr size_t GRAPH_SIZE = 1024;
static constexpr size_t RESERVE    = GGML_MAX_SRC;

// Returns when the device has computed the tensor, even if the device synchronizes early (see device_traits).
// REQUIRES: ggml_backend_synchronize(backend) was called; the tensor has four bytes or more.
static void wait_until_computed(ggml_backend_t backend, const ggml_tensor * tensor) {
    if (traits_of(ggml_backend_get_device(backend)).synchronizes_early) {
        float one;
        ggml_backend_tensor_get(tensor, &one, 0, sizeof(one));
    }
}

static char * base_of(const ggml_backend_buffer_ptr & buffer) {
    return static_cast<char *>(ggml_backend_buffer_get_base(buffer.get()));
}

inner_graph::inner_graph(ggml_backend_t backend, bool in_queue, const caller_settings * caller) :
    backend_(backend), in_queue_(in_queue), caller_(caller), alignment_(ggml_backend_get_alignment(backend)) {
    allocate(staged_, ggml_tensor_overhead());
    open_page(0);
}

void inner_graph::allocate(page & p, size_t size) {
    p.memory.reset(new char[size]);
    p.ctx.reset(ggml_init({ size, p.memory.get(), /* .no_alloc = */ true }));
}

void inner_graph::open_page(uint32_t number) {
    page & p = pages_[number];
    page_    = number;
    if (!p.ctx) {
        allocate(p, 2 * GRAPH_SIZE * ggml_tensor_overhead() + ggml_graph_overhead_custom(GRAPH_SIZE, false));
    }
    ctx_ = p.ctx.get();
    begin_graph();
}

void inner_graph::begin_layer(uint32_t layer) {
    if (in_queue_) {
        open_page(layer);
    }
}

inner_graph::~inner_graph() {
    if (!in_queue_) { // the queue's owner may be gone
        reset();
    }
}

void inner_graph::begin_graph() {
    ggml_reset(ctx_);
    graph_ = ggml_new_graph_custom(ctx_, GRAPH_SIZE, false);
    operands_.clear();
    numbers_.clear();
    n_nodes_  = 0;
    n_leaves_ = 0;
}

void inner_graph::reset() {
    if (is_running_) {
        ggml_backend_synchronize(backend_);
        count(&stats::device_waits);
    }
    begin_graph();
    is_running_ = false;
    forget_staged();
}

void inner_graph::count_copy(size_t n_bytes) {
    count(&stats::device_copies);
    count(&stats::device_copied_bytes, n_bytes);
}

// Each set of numbers or values is aligned.
size_t inner_graph::staged_room(const scratch_sizes & sizes) const {
    return sizes.rows * sizeof(int32_t) + sizes.values + GRAPH_SIZE * alignment_;
}

bool inner_graph::reserve(const scratch_sizes & sizes) {
    if (sizes.fits(sizes_)) {
        return true;
    }
    GGML_ASSERT(empty());
    const scratch_sizes grown = { std::max(sizes.gathered, sizes_.gathered), std::max(sizes.product, sizes_.product),
                                  std::max(sizes.rows, sizes_.rows), std::max(sizes.values, sizes_.values) };
    scratch_.reset(); // frees it before the larger one is allocated
    sizes_ = grown;
    scratch_.reset(ggml_backend_alloc_buffer(backend_, staged_offset() + staged_room(grown)));
    staging_ = alloc_host_buffer(backend_, staged_room(grown));
    if (!scratch_ || !staging_) {
        sizes_ = {};
    }
    return scratch_ && staging_;
}

bool inner_graph::full(size_t n) const {
    return std::max({ n_nodes_, n_leaves_, n_sets_ }) + n * RESERVE > GRAPH_SIZE;
}

//
// tensors
//

ggml_tensor * inner_graph::leaf(const ggml_tensor * tensor) {
    ggml_tensor * copy = ggml_new_tensor(ctx_, tensor->type, GGML_MAX_DIMS, tensor->ne);
    std::copy(tensor->nb, tensor->nb + GGML_MAX_DIMS, copy->nb);
    copy->data   = tensor->data;
    copy->buffer = root_of(tensor)->buffer;
    n_leaves_++;
    return copy;
}

// The node that computes the tensor, if it is in the graph, or one leaf for all uses: backends fuse by these.
ggml_tensor * inner_graph::operand(const ggml_tensor * tensor) {
    ggml_tensor *& known = operands_[tensor];
    known                = known ? known : leaf(tensor);
    return known;
}

ggml_tensor * inner_graph::matrices_leaf(const matrices & weights, const matrix_span & span) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx_, weights.type, weights.n_in, weights.n_out, span.last - span.first + 1);
    t->nb[2]        = weights.stride;
    t->nb[3]        = weights.stride * size_t(t->ne[2]);
    t->data         = weights.data + size_t(span.first) * weights.stride;
    init_weights(weights.buffer, t);
    n_leaves_++;
    return t;
}

// All rows of a float tensor.
ggml_tensor * inner_graph::rows_leaf(const ggml_tensor * tensor) {
    n_leaves_++;
    return rows_at(ctx_, tensor->type, tensor->ne[0], ggml_nrows(tensor), tensor->nb[1], tensor->data,
                   root_of(tensor)->buffer);
}

ggml_tensor * inner_graph::row_numbers(const std::vector<int32_t> & rows, int64_t n_columns) {
    ggml_tensor *& known = numbers_[{ n_columns, rows }];
    if (!known) {
        known = ggml_new_tensor_2d(ctx_, GGML_TYPE_I32, int64_t(rows.size()) / n_columns, n_columns);
        std::memcpy(stage(known), rows.data(), ggml_nbytes(known));
    }
    return known;
}

// Gives a leaf its place on the device, and returns the one in host memory where its bytes are to be written.
char * inner_graph::stage(ggml_tensor * tensor) {
    char * bytes = base_of(staging_) + n_staged_;
    place(tensor, staged_offset() + n_staged_);
    n_staged_ += padded(ggml_nbytes(tensor));
    GGML_ASSERT(n_staged_ <= ggml_backend_buffer_get_size(staging_.get()));
    n_sets_++;
    n_leaves_++;
    return bytes;
}

// A tensor that is valid until the next call.
ggml_tensor * inner_graph::bytes_at(ggml_backend_buffer_t buffer, void * data, size_t size, const char * name) {
    ggml_reset(staged_.ctx.get());
    ggml_tensor * t = ggml_new_tensor_1d(staged_.ctx.get(), GGML_TYPE_I8, int64_t(size));
    t->data         = data;
    t->buffer       = buffer;
    return ggml_set_name(t, name);
}

// Copies what is staged for the whole graph at once: each copy to a device has a latency, and queues behind uploads.
void inner_graph::copy_staged() {
    const size_t size = n_staged_ - n_copied_;
    if (size == 0) {
        return;
    }
    char * to = base_of(scratch_) + staged_offset() + n_copied_;
    ggml_backend_tensor_set_async(backend_, bytes_at(scratch_.get(), to, size, ""), base_of(staging_) + n_copied_, 0,
                                  size);
    count_copy(size);
    n_copied_ += size;
}

ggml_tensor * inner_graph::reshape(ggml_tensor * tensor, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * t = ggml_reshape_3d(ctx_, tensor, ne0, ne1, ne2);
    t->buffer       = tensor->buffer;
    return t;
}

void inner_graph::place(ggml_tensor * tensor, size_t scratch_offset) {
    tensor->data   = base_of(scratch_) + scratch_offset;
    tensor->buffer = scratch_.get();
}

void inner_graph::add_node(ggml_tensor * node) {
    const int n_before = ggml_graph_n_nodes(graph_);
    ggml_build_forward_expand(graph_, node);
    n_nodes_ += size_t(ggml_graph_n_nodes(graph_) - n_before);
}

//
// operations
//

void inner_graph::add_copy(const ggml_tensor * node) {
    ggml_tensor * copy = leaf(node);
    copy->op           = node->op;
    std::memcpy(copy->op_params, node->op_params, sizeof(copy->op_params));
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        copy->src[i] = node->src[i] ? operand(node->src[i]) : nullptr;
    }
    add_node(copy);
    operands_[node] = copy;
}

static bool rows_are_even(const ggml_tensor * t) {
    return (t->ne[2] == 1 || t->nb[2] == t->ne[1] * t->nb[1]) && (t->ne[3] == 1 || t->nb[3] == t->ne[2] * t->nb[2]);
}

// Returns true if a matmul meets the requirements of add_matmul.
static bool is_computable(const ggml_tensor * matmul) {
    const ggml_tensor * src = matmul->src[1];
    return rows_are_even(src) && rows_are_even(matmul) && src->type == GGML_TYPE_F32 && matmul->type == GGML_TYPE_F32;
}

static bool are_all_rows(const ggml_tensor * matmul, const std::vector<served_row> & rows) {
    return int64_t(rows.size()) == matmul->ne[1] * matmul->ne[2];
}

bool inner_graph::are_distinct(const ggml_tensor * matmul, const std::vector<served_row> & rows) {
    const auto is_twice = [n = matmul->ne[1]](const served_row & a, const served_row & b) {
        return a.matrix == b.matrix && a.row / n == b.row / n;
    };
    return std::adjacent_find(rows.begin(), rows.end(), is_twice) == rows.end();
}

// The first matrix of the span lies at an aligned address, as number 0 does.
inner_graph::matrix_span inner_graph::span_of(const matrices & weights, const std::vector<served_row> & rows) const {
    const auto by_matrix = [](const served_row & a, const served_row & b) { return a.matrix < b.matrix; };
    const auto ends      = std::minmax_element(rows.begin(), rows.end(), by_matrix);
    const auto step      = int32_t(alignment_ / std::gcd(alignment_, weights.stride));
    return { ends.first->matrix / step * step, ends.second->matrix };
}

ggml_tensor * inner_graph::multiply(const ggml_tensor * matmul, ggml_tensor * weights, ggml_tensor * src,
                                    ggml_tensor * ids) {
    ggml_tensor * product = ggml_mul_mat_id(ctx_, weights, src, ids);
    std::memcpy(product->op_params, matmul->op_params, sizeof(product->op_params));
    return product;
}

// The matmul itself, without the rows that are not given; its result has no memory yet.
ggml_tensor * inner_graph::multiply_all(const ggml_tensor * matmul, const matrices & weights,
                                        const std::vector<served_row> & rows) {
    // kernels for one token do no work for matrices that it does not use: its graph is always the same
    const bool           is_token = in_queue_ && matmul->ne[2] == 1 && ggml_is_quantized(weights.type);
    const matrix_span    span     = is_token ? matrix_span{ 0, weights.count - 1 } : span_of(weights, rows);
    std::vector<int32_t> matrix(size_t(matmul->ne[1] * matmul->ne[2]), -1);
    for (const served_row & r : rows) {
        matrix[r.row] = r.matrix - span.first;
    }
    ggml_tensor * w   = matrices_leaf(weights, span);
    ggml_tensor * ids = row_numbers(matrix, matmul->ne[2]);
    return multiply(matmul, w, operand(matmul->src[1]), ids);
}

// Multiplies only these rows, adjacent in the scratch memory; `to` gets their numbers.
ggml_tensor * inner_graph::multiply_some(const ggml_tensor * matmul, const matrices & weights,
                                         const std::vector<served_row> & rows, ggml_tensor *& to) {
    const ggml_tensor *  src    = matmul->src[1];
    const int64_t        n_used = matmul->ne[1];
    const int64_t        n      = int64_t(rows.size());
    const matrix_span    span   = span_of(weights, rows);
    std::vector<int32_t> matrix;
    std::vector<int32_t> from; // the input has a row per token, or one per selection
    std::vector<int32_t> row;
    for (const served_row & r : rows) {
        matrix.push_back(r.matrix - span.first);
        from.push_back(int32_t(r.row / n_used * src->ne[1] + r.row % n_used % src->ne[1]));
        row.push_back(r.row);
    }
    ggml_tensor * gathered = ggml_get_rows(ctx_, rows_leaf(src), row_numbers(from));
    place(gathered, 0);
    ggml_tensor * w       = matrices_leaf(weights, span);
    ggml_tensor * ids     = row_numbers(matrix, n);
    ggml_tensor * product = multiply(matmul, w, reshape(gathered, gathered->ne[0], 1, n), ids);
    place(product, product_offset());
    GGML_ASSERT(ggml_nbytes(gathered) <= sizes_.gathered && ggml_nbytes(product) <= sizes_.product);
    to = row_numbers(row);
    return reshape(product, product->ne[0], n, 1);
}

void inner_graph::scatter(const ggml_tensor * matmul, ggml_tensor * rows, ggml_tensor * to) {
    ggml_tensor * scattered = ggml_set_rows(ctx_, rows_leaf(matmul), rows, to);
    scattered->buffer       = matmul->buffer;
    add_node(scattered);
    operands_.erase(matmul);
}

// Gives the whole product its place.
void inner_graph::add_product(const ggml_tensor * matmul, ggml_tensor * product) {
    std::copy(matmul->nb, matmul->nb + GGML_MAX_DIMS, product->nb);
    product->data   = matmul->data;
    product->buffer = matmul->buffer;
    add_node(product);
    operands_[matmul] = product;
}

void inner_graph::add_matmul(const ggml_tensor * matmul, const matrices & weights, ggml_tensor * numbers) {
    GGML_ASSERT(is_computable(matmul));
    ggml_tensor * w = matrices_leaf(weights, { 0, weights.count - 1 });
    add_product(matmul, multiply(matmul, w, operand(matmul->src[1]), numbers));
}

ggml_tensor * inner_graph::add_look_up(const ggml_tensor * table, const ggml_tensor * ids, const ggml_tensor * to) {
    ggml_tensor * found = ggml_get_rows(ctx_, operand(table), operand(ids));
    found->data         = to->data;
    found->buffer       = to->buffer;
    add_node(found);
    return reshape(found, ids->ne[0], 1, 1);
}

void inner_graph::add_matmul(const ggml_tensor * matmul, const matrices & weights,
                             const std::vector<served_row> & rows) {
    GGML_ASSERT(is_computable(matmul));
    const bool is_short   = matmul->ne[2] <= batch_info::max_generated; // few rows are converted for nothing
    const bool leaves_out = is_short && is_host_device(ggml_backend_get_device(backend_)); // patch 0023
    if ((leaves_out || are_all_rows(matmul, rows)) && are_distinct(matmul, rows)) {
        add_product(matmul, multiply_all(matmul, weights, rows));
        return;
    }
    ggml_tensor * to      = nullptr;
    ggml_tensor * product = multiply_some(matmul, weights, rows, to);
    scatter(matmul, product, to);
}

void inner_graph::add_scatter(const ggml_tensor * tensor, const ggml_tensor * from, const std::vector<int32_t> & rows) {
    scatter(tensor, operand(from), row_numbers(rows));
}

status inner_graph::add_rows(const ggml_tensor * tensor, const float * values, const std::vector<int32_t> & rows) {
    const size_t row_size = size_t(tensor->ne[0]) * sizeof(float);
    const size_t taken    = row_size + sizeof(int32_t); // a row with its number
    GGML_ASSERT(taken <= sizes_.values);
    for (size_t first = 0; first < rows.size();) {
        const size_t room = full() ? 0 : (sizes_.values - n_values_) / taken;
        if (room == 0) {
            HOBBIT_TRY(compute());
            continue;
        }
        const size_t               n    = std::min(room, rows.size() - first);
        const auto                 from = rows.begin() + ptrdiff_t(first);
        const std::vector<int32_t> some(from, from + ptrdiff_t(n));
        ggml_tensor *              staged = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, tensor->ne[0], int64_t(n));
        char *                     bytes  = stage(staged);
        if (values) {
            std::memcpy(bytes, values + first * size_t(tensor->ne[0]), n * row_size);
        } else {
            std::memset(bytes, 0, n * row_size);
        }
        scatter(tensor, staged, row_numbers(some));
        n_values_ += n * taken;
        first     += n;
    }
    return {};
}

// Tensors that lie near each other share a copy, because each copy has a latency.
std::vector<inner_graph::span_copy> inner_graph::copies_of(const std::vector<const ggml_tensor *> & tensors) {
    static constexpr ptrdiff_t near = 32 << 10;
    std::vector<span_copy>     copies;
    for (const ggml_tensor * t : tensors) {
        auto *     begin   = static_cast<char *>(t->data);
        char *     end     = begin + ggml_nbytes(t);
        const bool is_near = !copies.empty() && copies.back().buffer == root_of(t)->buffer &&
                             std::max(end, copies.back().end) - std::min(begin, copies.back().begin) <= near;
        if (!is_near) {
            copies.push_back({ root_of(t)->buffer, begin, end, t->name });
        }
        copies.back().begin = std::min(copies.back().begin, begin);
        copies.back().end   = std::max(copies.back().end, end);
        copies.back().tensors.push_back(t);
    }
    return copies;
}

std::vector<const char *> inner_graph::read(const std::vector<const ggml_tensor *> & tensors,
                                            const std::function<void()> &            meanwhile) {
    std::vector<span_copy> copies = copies_of(tensors);
    size_t                 room   = 0;
    for (span_copy & c : copies) {
        c.offset = std::exchange(room, room + padded(c.size()));
    }
    if (!inbox_ || ggml_backend_buffer_get_size(inbox_.get()) < room) {
        inbox_ = alloc_host_buffer(backend_, room);
        if (!inbox_) {
            throw std::bad_alloc();
        }
    }
    const auto is_own = [own = ggml_backend_get_default_buffer_type(backend_)](const span_copy & c) {
        return ggml_backend_buffer_get_type(c.buffer) == own;
    };
    std::vector<const char *> bytes;
    for (const span_copy & c : copies) {
        char * to = base_of(inbox_) + c.offset;
        if (is_own(c)) {
            ggml_backend_tensor_get_async(backend_, bytes_at(c.buffer, c.begin, c.size(), c.name), to, 0, c.size());
        }
        count_copy(c.size());
        for (const ggml_tensor * t : c.tensors) {
            bytes.push_back(to + (static_cast<char *>(t->data) - c.begin));
        }
    }
    is_running_ = false; // once the copies have ended
    if (meanwhile && std::all_of(copies.begin(), copies.end(), is_own)) {
        copied_.reset(copied_ ? copied_.release() : ggml_backend_event_new(ggml_backend_get_device(backend_)));
        ggml_backend_event_record(copied_.get(), backend_);
        meanwhile();
        ggml_backend_event_synchronize(copied_.get());
        forget_staged();
    } else {
        ggml_backend_synchronize(backend_);
    }
    for (const span_copy & c : copies) {
        if (!is_own(c)) {
            char * to = base_of(inbox_) + c.offset;
            ggml_backend_tensor_get(bytes_at(c.buffer, c.begin, c.size(), c.name), to, 0, c.size());
        }
    }
    count(&stats::device_reads);
    if (!is_running_ && empty()) {
        reset();
    }
    return bytes;
}

status inner_graph::launch() {
    if (empty()) {
        return {};
    }
    std::optional<timeline_span> span;
    if (stats_) {
        span.emplace(stats_->events, "experts", "operations", ggml_graph_n_nodes(graph_));
    }
    copy_staged();
    ggml_status result;
    if (is_measured_) {
        const auto start = std::chrono::steady_clock::now();
        result           = ggml_backend_graph_compute(backend_, graph_);
        if (result == GGML_STATUS_SUCCESS) {
            wait_until_computed(backend_, ggml_graph_node(graph_, -1));
        }
        measured_ += std::chrono::steady_clock::now() - start;
    } else {
        result = ggml_backend_graph_compute_async(backend_, graph_);
    }
    is_running_ = true;
    count(&stats::device_launches);
    ggml_graph_clear(graph_);
    operands_.clear();
    if (result == GGML_STATUS_ABORTED) {
        return status::aborted();
    }
    return result == GGML_STATUS_SUCCESS
               ? status()
               : status::error("%s failed to compute experts (%s): check that the device still works",
                               ggml_backend_name(backend_), ggml_status_to_string(result));
}

status inner_graph::compute() {
    if (empty() && !is_running_) {
        return {};
    }
    status s = launch();
    reset();
    return s;
}

} // namespace hobbit
