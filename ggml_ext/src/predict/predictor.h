// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "hobbit.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Predicts which experts the next layers will choose, by their routers applied to the router's input of the layer in
// hand (HOBBIT, section 3.3): what one layer adds to the residual stream is small. The routers of all layers with
// routed experts are stacked into one matrix, so that those of any layers ahead take one product. As in the paper, the
// gains of the norms before the routers, which differ between layers, are left as they are, and a router that first
// chooses among groups of experts is taken for one that does not.
//
// The copy is in half precision, 2 bytes x width x experts of all layers: it is read once per layer and token, and
// half precision has more digits than the bfloat16 that most routers were trained in.
//
// Thread-safety: none.
class predictor {
  public:
    // The index must outlive the predictor. `buft` is of the device that computes.
    explicit predictor(const expert_index & index, ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type());
    ~predictor();

    predictor(const predictor &)             = delete;
    predictor & operator=(const predictor &) = delete;

    // Copies a layer's router; parameters as of hobbit_set_router. A router that cannot be stacked with the first one
    // is left out with a warning: its layer is not predicted. An error means that the copy does not fit into memory.
    status set_router(layer_id layer, const ggml_tensor * weight, const ggml_tensor * bias,
                      const ggml_tensor * selection_bias, hobbit_gating gating);

    // Of the copy; what predicting takes beside it is some MiB at most.
    size_t bytes() const;

    bool knows(layer_id layer) const { return routers_[layer].n_experts > 0; }

    // Whether this, a tensor of an outer graph, can be multiplied with the routers: float rows of their width.
    bool accepts(const ggml_tensor * router_input) const;

    // What the up to n_ahead layers after `layer` are predicted to choose, in their order, up to the first whose router
    // is not known: n_used experts for each row of router_input, best first, with weights of sum 1.
    // REQUIRES: accepts(router_input).
    status compute(ggml_backend_t backend, const ggml_tensor * router_input, layer_id layer, uint32_t n_ahead,
                   int64_t n_used, std::vector<layer_routing> & predictions);

  private:
    struct router {
        uint32_t           n_experts = 0; // 0: not known
        hobbit_gating      gating    = HOBBIT_GATING_SOFTMAX;
        std::vector<float> bias;           // empty: none
        std::vector<float> selection_bias; // empty: none
    };

    static void choose(const router & r, const float * outputs, layer_routing & to);

    bool   allocate_stack(int64_t width);
    bool   reserve(ggml_backend_t backend, size_t size);
    status multiply(ggml_backend_t backend, const ggml_tensor * router_input, int64_t first, int64_t n_tokens,
                    layer_id layer, uint32_t n_layers);

    const expert_index &             index_;
    const ggml_backend_buffer_type_t buft_;
    const uint32_t                   n_experts_; // rows of each layer in the stack
    std::vector<router>              routers_;   // [layer]

    ggml_context *        stack_ctx_    = nullptr; // owned
    ggml_tensor *         stack_        = nullptr; // [width, n_layers * n_experts], null before the first router
    ggml_backend_buffer_t stack_buffer_ = nullptr; // owned
    ggml_context *        graph_ctx_    = nullptr; // owned
    ggml_backend_buffer_t scratch_      = nullptr; // owned, of the product
    std::vector<float>    outputs_;                // the product: [token][layer ahead][expert]
};

} // namespace hobbit
