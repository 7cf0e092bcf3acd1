// SPDX-License-Identifier: MIT
#include "plain-rows.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-cpu-impl.h"
#include "repack.h"
#include "traits.h"

#include <algorithm>
#include <numeric>

// PLAIN_KERNELS lists *-kernel.cpp; those that this processor lacks are null. Constants need no constructor: that would
// run in the libraries for all processors, which ggml loads to ask each whether it suits this one.
#define KERNEL(name) extern const plain_kernel name __attribute__((weak));
PLAIN_KERNELS
#undef KERNEL
#define KERNEL(name) &name,
static const plain_kernel * const kernels[] = { PLAIN_KERNELS };

namespace {

// The kernel for such weights, with the bits of repacked rows or of one, or null.
const plain_kernel * kernel_of(const ggml_tensor & w, bool is_repacked) {
    const auto found = std::find_if(std::begin(kernels), std::end(kernels), [&](const plain_kernel * kernel) {
        if (!kernel || kernel->type != w.type) {
            return false;
        }
        const bool has  = is_repacked ? kernel->repacked != nullptr : kernel->dot || kernel->multiply;
        const bool fits = w.ne[0] <= kernel->most_columns && (!kernel->tiled || w.ne[1] % 4 == 0);
        return has && fits;
    });
    return found == std::end(kernels) ? nullptr : *found;
}

// Returns true if llama.cpp would repack them.
bool is_repacked(const ggml_tensor & w) {
    return w.buffer && ggml_backend_buffer_get_type(w.buffer) == ggml_backend_cpu_plain_rows_buffer_type();
}

// The row i1 of a matrix; all matrices of a tensor are counted.
char * row_of(const ggml_tensor & t, int64_t i1, int64_t matrix) {
    return (char *) t.data + i1 * t.nb[1] + matrix % t.ne[2] * t.nb[2] + matrix / t.ne[2] * t.nb[3];
}

// An operation: each matrix of weights is multiplied by rows of activations of its own.
class products {
  public:
    products(const ggml_tensor & op, const ggml_compute_params & params) : op_(op), params_(params) {}

    size_t work_size() const { return numbers_size_ + row_size_ * ggml_nrows(&x_); }

    // Converts this thread's part of each row, or its fours of rows, to the type that the weights are multiplied by.
    void convert() const {
        const auto    four       = type_ == GGML_TYPE_Q8_K ? ggml_quantize_mat_q8_K_4x8 : ggml_quantize_mat_q8_0_4x8;
        const auto    from_float = ggml_get_type_traits_cpu(type_)->from_float;
        const int64_t n_blocks   = x_.ne[0] / ggml_blck_size(type_);
        const int64_t begin      = params_.ith * n_blocks / params_.nth;
        const int64_t end        = (params_.ith + 1) * n_blocks / params_.nth;
        for (int64_t i = 0; i < ggml_nrows(&x_); i++) {
            const int64_t row  = i % x_.ne[1];
            const auto *  from = (const float *) row_of(x_, row, i / x_.ne[1]);
            if (row >= n_in_fours_) {
                from_float(from + begin * ggml_blck_size(type_), converted_row(i) + begin * ggml_type_size(type_),
                           (end - begin) * ggml_blck_size(type_));
            } else if (row % 4 == 0 && row / 4 % params_.nth == params_.ith) {
                four(from, converted_row(i), x_.ne[0]);
            }
        }
    }

    // Orders rows by their experts; those of expert -1 are left out.
    void sort() const {
        if (!ids_) {
            return;
        }
        const auto for_each = [&](const auto & call) {
            for (int64_t i = ggml_nelements(ids_) - 1; i >= 0; i--) {
                const char *  id     = row_of(*ids_, i / ids_->ne[0], 0) + i % ids_->ne[0] * ids_->nb[0];
                const int32_t expert = *(const int32_t *) id;
                GGML_ASSERT(expert >= -1 && expert < w_.ne[2]);
                if (expert != -1) {
                    call(numbers_[expert], int32_t(i));
                }
            }
        };
        std::fill_n(numbers_, numbers_size_ / sizeof(int32_t), 0);
        for_each([](int32_t & n, int32_t) { n++; });
        std::partial_sum(numbers_, numbers_ + n_matrices_ + 1, numbers_);
        for_each([&](int32_t & end, int32_t row) { numbers_[n_matrices_ + 1 + --end] = row; });
    }

    // Computes this thread's chunks. REQUIRES: all threads have converted, and one has sorted.
    void multiply() const {
        const int64_t n_rows = ggml_nrows(&x_) / n_matrices_; // each matrix has so many, without experts
        int64_t       chunk  = params_.ith;                   // beyond all if the computation is aborted
        int64_t       before = 0;                             // chunks of the matrices before
        for (int64_t matrix = 0; matrix < n_matrices_; matrix++) {
            const int64_t first      = ids_ ? numbers_[matrix] : n_rows * matrix;
            const int64_t n          = ids_ ? numbers_[matrix + 1] - first : n_rows;
            const auto [n_x, n_y]    = chunk_size(n); // rows of weights and of activations
            const int64_t n_chunks_x = (w_.ne[1] + n_x - 1) / n_x;
            const int64_t n_chunks   = n_chunks_x * ((n + n_y - 1) / n_y);
            for (; chunk - before < n_chunks; chunk = ggml_threadpool_chunk_add(params_.threadpool, 1)) {
                const int64_t x = (chunk - before) % n_chunks_x * n_x;
                const int64_t y = (chunk - before) / n_chunks_x * n_y;
                multiply_chunk(matrix, x, std::min(n_x, w_.ne[1] - x), first + y, std::min(n_y, n - y), several(n));
            }
            before += n_chunks;
        }
    }

  private:
    // Chunks are long, since each prepares its rows anew; but the second cache holds weights that several rows need.
    std::pair<int64_t, int64_t> chunk_size(int64_t n_rows) const {
        const int64_t n_all = ids_ ? numbers_[n_matrices_] : ggml_nrows(&x_); // rows of all matrices
        int64_t       n_x = n_rows == 1 || w_.nb[1] <= 2048 ? 256 : 128, n_y = 512;
        while (w_.ne[1] * n_all < 4 * params_.nth * n_x * std::min(n_y, n_rows) && n_x > 16) {
            (n_y > PLAIN_ROWS ? n_y : n_x) /= 2;
        }
        return { n_x, n_y };
    }

    // The function for n rows of activations of a matrix, or null: each by itself.
    plain_multiply * several(int64_t n) const {
        const bool is_tiled = kernel_ && kernel_->tiled && (ids_ ? n : x_.ne[1]) >= TILED_ROWS;
        return is_tiled ? kernel_->tiled : kernel_ && n > 1 ? kernel_->multiply : nullptr;
    }

    void multiply_chunk(int64_t matrix, int64_t x, int64_t nc, int64_t y, int64_t n, plain_multiply * multiply) const {
        const int64_t stack = ids_ || is_repacked_ ? 0 : matrix / w_.ne[2] / (x_.ne[3] / w_.ne[3]);
        const char *  vx    = row_of(w_, x, matrix % w_.ne[2] + stack * w_.ne[2]);
        const void *  vy[PLAIN_ROWS];
        float *       s[PLAIN_ROWS];
        for (int nr; n > 0; n -= nr, y += nr) {
            const int64_t in_fours = ids_ ? 0 : n_in_fours_ - y % x_.ne[1];
            nr                     = int(std::min({ int64_t(PLAIN_ROWS), n, in_fours > 0 ? in_fours : n }));
            for (int i = 0; i < nr; i++) {
                const int64_t row   = ids_ ? numbers_[n_matrices_ + 1 + y + i] : y + i;
                const int64_t token = row / op_.ne[1];
                vy[i] = converted_row(row % op_.ne[1] % x_.ne[1] + token * x_.ne[1] - (in_fours > 0 ? i % 4 : 0));
                s[i]  = (float *) row_of(op_, row % op_.ne[1], token) + x;
            }
            if (is_repacked_) {
                (in_fours > 0 ? kernel_->repacked_by_fours : kernel_->repacked)(w_.ne[0], s, vx, w_.nb[1], vy, nr, nc);
            } else if (multiply) {
                multiply(w_.ne[0], s, vx, w_.nb[1], vy, nr, nc);
            } else {
                multiply_each(s, vx, vy, nr, nc);
            }
        }
    }

    void multiply_each(float * const * s, const char * vx, const void * const * vy, int nr, int64_t nc) const {
        const ggml_vec_dot_t dot = kernel_ && kernel_->dot ? kernel_->dot : ggml_get_type_traits_cpu(w_.type)->vec_dot;
        for (int64_t x = 0; x < nc; x++, vx += w_.nb[1]) {
            for (int i = 0; i < nr; i++) {
                dot(int(w_.ne[0]), s[i] + x, 0, vx, 0, vy[i], 0, 1);
            }
        }
    }

    char * converted_row(int64_t i) const { return (char *) params_.wdata + numbers_size_ + i * row_size_; }

    const ggml_tensor &         op_;
    const ggml_compute_params & params_;
    const ggml_tensor &         w_           = *op_.src[0];
    const ggml_tensor &         x_           = *op_.src[1];
    const ggml_tensor * const   ids_         = op_.op == GGML_OP_MUL_MAT_ID ? op_.src[2] : nullptr;
    const bool                  is_repacked_ = is_repacked(w_);
    const int64_t               n_matrices_  = (is_repacked_ && !ids_ ? x_.ne[2] : w_.ne[2]) * x_.ne[3];
    const int64_t               n_in_fours_  = is_repacked_ && !ids_ ? x_.ne[1] / 4 * 4 : 0; // rows of a matrix
    const plain_kernel * const  kernel_      = kernel_of(w_, is_repacked_);
    const ggml_type             type_        = ggml_get_type_traits_cpu(w_.type)->vec_dot_type;
    const size_t                row_size_    = ggml_row_size(type_, x_.ne[0]);
    const size_t    numbers_size_ = ids_ ? GGML_PAD((n_matrices_ + 1 + ggml_nelements(ids_)) * sizeof(int32_t), 64) : 0;
    int32_t * const numbers_      = (int32_t *) params_.wdata; // where each expert's rows begin, then rows
};

class plain_rows : public ggml::cpu::extra_buffer_type, public ggml::cpu::tensor_traits {
    // Takes weights that llama.cpp would repack.
    bool supports_op(ggml_backend_dev_t device, const ggml_tensor * op) override {
#ifdef GGML_USE_CPU_REPACK
        static const ggml_backend_buffer_type_t repacked = ggml_backend_cpu_repack_buffer_type();
        static const ggml_backend_buffer_ptr    buffer(ggml_backend_buft_alloc_buffer(repacked, 0));
        if ((op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) || !kernel_of(*op->src[0], true)) {
            return false;
        }
        ggml_tensor w    = *op->src[0];
        ggml_tensor copy = *op;
        w.buffer         = buffer.get();
        copy.src[0]      = &w;
        return static_cast<ggml::cpu::extra_buffer_type *>(repacked->context)->supports_op(device, &copy);
#else
        return false;
#endif
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        const bool has_ids = op->op == GGML_OP_MUL_MAT_ID;
        if ((op->op != GGML_OP_MUL_MAT && !has_ids) || op->src[1]->type != GGML_TYPE_F32 ||
            ggml_get_op_params_i32(op, 1) == GGML_HINT_SRC0_IS_HADAMARD) {
            return nullptr;
        }
        const ggml_tensor &  w       = *op->src[0];
        const plain_kernel * kernel  = kernel_of(w, false);
        const bool           is_key  = !has_ids && w.ne[2] != op->src[1]->ne[2]; // or a value: ggml is faster
        const int64_t        n_rows  = op->src[has_ids ? 2 : 1]->ne[1];
        const bool           is_ours = kernel ? has_ids || n_rows == 1 || n_rows >= kernel->least_rows
                                              : n_rows == 1 && !is_key && !ggml_is_numa(); // there, threads have own rows
        return is_repacked(w) || (is_ours && (!w.buffer || ggml_backend_buffer_is_host(w.buffer))) ? this : nullptr;
    }

    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        size = products(*op, {}).work_size();
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        const products all(*op, *params);
        all.convert();
        if (params->ith == 0) {
            all.sort();
            ggml_threadpool_chunk_set(params->threadpool, params->nth); // a thread's first has the thread's number
        }
        ggml_barrier(params->threadpool);
        all.multiply();
        return true;
    }
};

} // namespace

ggml_backend_buffer_type_t ggml_backend_cpu_plain_rows_buffer_type() {
    static plain_rows               rows;
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type copy = *ggml_backend_cpu_buffer_type();
        copy.iface.get_name           = [](ggml_backend_buffer_type_t) { return "CPU_PLAIN_ROWS"; };
        copy.context                  = static_cast<ggml::cpu::extra_buffer_type *>(&rows);
        return copy;
    }();
    return &type;
}
