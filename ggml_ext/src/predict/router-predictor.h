// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-cpp.h"
#include "predict/predictor.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Applies the routers of the next layers to the router input of the running layer (HOBBIT, section 3.3), since one
// layer changes the residual stream little. The routers of all layers with routed experts are stacked into one matrix,
// so that one matmul covers any number of layers ahead. The gains of the norms before the routers differ between
// layers: the running layer's are divided out of its input, and each router in the stack carries its own. A router's
// first choice among groups of experts is ignored.
//
// The stacked copy takes 2 bytes x width x experts of all layers, in half precision, and the gains 4 x width x layers.
// It is read once per layer and token, and half precision has more digits than the bfloat16 that most routers were
// trained in. The product takes some further MiB at most.
class router_predictor final : public predictor {
  public:
    explicit router_predictor(const predictor_options & options);

    // A router that cannot be stacked with the first one is left out with a warning: its layer is not predicted.
    status set_router(layer_id layer, const hobbit_router & given) override;

    size_t bytes() const override;

    bool knows(layer_id layer) const override { return routers_[layer].n_experts > 0; }

    // Rows of floats that are as wide as the routers.
    bool accepts(const ggml_tensor * router_input) const override;

    const ggml_tensor * begin(layer_id running, uint32_t n_ahead, const ggml_tensor * router_input,
                              ggml_backend_t backend) override;
    void                end(const char * bytes) override;

    status predict(const layer_routing & running, uint32_t n_ahead, const ggml_tensor * router_input,
                   ggml_backend_t backend, std::vector<layer_routing> & predictions) override;

    status rank(const layer_routing & running, const ggml_tensor * router_input, ggml_backend_t backend,
                std::vector<int32_t> & ranking) override;

  private:
    struct router {
        uint32_t           n_experts = 0; // 0: not known
        hobbit_gating      gating    = HOBBIT_GATING_SOFTMAX;
        uint32_t           n_used    = 0; // 0: as many as the running layer
        bool               has_gain  = false;
        std::vector<float> bias;           // empty: none
        std::vector<float> selection_bias; // empty: none
    };

    static void choose(const router & r, const float * outputs, layer_routing & to);

    status make_stack(int64_t width);
    bool   reserve(ggml_backend_t backend, size_t size);
    size_t count_known(layer_id running, uint32_t n_ahead) const;
    status build(ggml_backend_t backend, const ggml_tensor * router_input, int64_t first, int64_t n_tokens,
                 layer_id running, size_t n_layers);
    status multiply(ggml_backend_t backend, const ggml_tensor * router_input, int64_t first, int64_t n_tokens,
                    layer_id running, size_t n_layers);

    const predictor_options options_;
    const uint32_t          n_experts_; // rows of each router in the stack
    std::vector<router>     routers_;   // [layer]

    ggml_context_ptr        stack_ctx_;
    ggml_tensor *           stack_   = nullptr; // [width, n_layers * n_experts]; null before the first router
    ggml_tensor *           inverse_ = nullptr; // [width, n_layers], of the gains
    ggml_backend_buffer_ptr stack_buffer_;
    ggml_context_ptr        graph_ctx_;
    ggml_backend_buffer_ptr scratch_;           // holds the product
    ggml_cgraph *           graph_   = nullptr; // in graph_ctx_, of the product
    ggml_tensor *           product_ = nullptr; // in graph_ctx_
    std::vector<float>      outputs_;           // the product: [token][layer][expert], the n_own_ running ones first
    layer_id                begun_;             // the running layer of the product that begin() has begun
    bool                    is_begun_ = false;  // outputs_ are those of begun_
    size_t                  n_own_    = 0;      // 1: the product begins with the running layer, which is ranked
};

} // namespace hobbit
