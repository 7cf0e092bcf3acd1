// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"
#include "graph/stage.h"
#include "offload/cpu-rows.h"

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
    friend class section_copier;

    ggml_context_ptr ctx_;
    ggml_cgraph *    graph_ = nullptr;
    ggml_tensor *    input_ = nullptr;
};

} // namespace hobbit
