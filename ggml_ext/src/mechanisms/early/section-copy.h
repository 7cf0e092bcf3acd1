// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"
#include "offload/cpu-rows.h"

#include <map>
#include <memory>

namespace hobbit {

// A copy of a section that computes one token, and outlives the outer graph. Its tensors have no memory. Biases are the
// outer graph's tensors, which belong to the model.
class section_copy {
  public:
    // Null if the section reads more than one row of input.
    static std::unique_ptr<section_copy> make(const layer_section & section);

    const ggml_tensor * input() const { return input_; }

    layer_section section() const { return { graph_, 0, ggml_graph_n_nodes(graph_) }; }

  private:
    explicit section_copy(const layer_section & section);

    ggml_tensor * duplicate(const ggml_tensor * t);
    ggml_tensor * copy(const ggml_tensor * node);
    ggml_tensor * weights(const ggml_tensor * t);
    ggml_tensor * ids(const ggml_tensor * t);
    ggml_tensor * source(const ggml_tensor * t);

    ggml_context_ptr ctx_;
    ggml_cgraph *    graph_;
    ggml_tensor *    input_    = nullptr;
    int              n_inputs_ = 0;

    std::map<const ggml_tensor *, ggml_tensor *> copies_; // [outer]; null: of the section, not copied yet
};

} // namespace hobbit
