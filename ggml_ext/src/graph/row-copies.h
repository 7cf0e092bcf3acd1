// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"
#include "graph/routing.h"

#include <map>
#include <vector>

namespace hobbit {

// The nodes of a section, without no-ops.
std::vector<const ggml_tensor *> nodes_of(const layer_section & section);

inline const ggml_tensor * root_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

// Tensors of these that none of the nodes behind them reads.
std::vector<const ggml_tensor *> results_of(const std::vector<const ggml_tensor *> & nodes);

// A section's operations, repeated on some of its rows. The caller gives the tensors memory, and values to those that
// the section does not compute.
//
// Thread-safety: none.
class row_copies {
  public:
    // Each tensor gets so many rows, at ne[1] or at ne[2].
    void begin(size_t n_nodes, int64_t ne1, int64_t ne2);

    ggml_context * ctx() const { return ctx_.get(); }

    // Stands for the outer tensor.
    void set(const ggml_tensor * outer, ggml_tensor * copy) { copies_[outer] = copy; }

    // The copy of an outer tensor; a view where its root has a copy.
    ggml_tensor * of(const ggml_tensor * outer);

    // Repeats a node. A matmul keeps its weights, which say which experts.
    ggml_tensor * repeat(const ggml_tensor * node);

  private:
    int64_t                                      ne1_ = 0;
    int64_t                                      ne2_ = 0;
    ggml_context_ptr                             ctx_;
    std::map<const ggml_tensor *, ggml_tensor *> copies_; // [outer]
};

} // namespace hobbit
