// SPDX-License-Identifier: MIT
#pragma once

#include "expert-index.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "gguf-builder.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

struct compute_backend {
    ggml_backend_t backend;

    explicit compute_backend(ggml_backend_dev_t device) : backend(ggml_backend_dev_init(device, nullptr)) {
        if (ggml_backend_is_cpu(backend)) {
            ggml_backend_cpu_set_n_threads(backend, 2);
        }
    }

    ~compute_backend() { ggml_backend_free(backend); }

    compute_backend(const compute_backend &)             = delete;
    compute_backend & operator=(const compute_backend &) = delete;
};

struct cpu_backend : compute_backend {
    cpu_backend() : compute_backend(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {}
};

// What a layer's experts are given: activations, and the router's choice with its weights.
struct layer_input {
    int64_t              n_tokens;
    int64_t              n_used;
    std::vector<float>   x;       // [token][n_embd]
    std::vector<int32_t> ids;     // [token][n_used], distinct for a token
    std::vector<float>   weights; // [token][n_used], of sum 1 for a token
};

inline layer_input random_input(const moe_model & model, int64_t n_tokens, unsigned seed) {
    layer_input  input = { n_tokens, model.n_used, {}, {}, {} };
    std::mt19937 random(seed);
    const auto   uniform = [&] { return float(random() % 10000 + 1) / 10000.0f; };
    for (int64_t i = 0; i < n_tokens * model.n_embd; i++) {
        input.x.push_back(uniform() * 2.0f - 1.0f);
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        std::vector<int32_t> experts(size_t(model.n_experts));
        std::iota(experts.begin(), experts.end(), 0);
        std::shuffle(experts.begin(), experts.end(), random);
        std::vector<float> weights(size_t(input.n_used));
        for (float & weight : weights) {
            weight = uniform();
        }
        const float sum = std::accumulate(weights.begin(), weights.end(), 0.0f);
        for (size_t k = 0; k < weights.size(); k++) {
            input.ids.push_back(experts[k]);
            input.weights.push_back(weights[k] / sum);
        }
    }
    return input;
}

// Of a weight tensor with all its experts.
struct plain_weight {
    ggml_type   type;
    std::string bytes;
};

using rows = std::vector<std::vector<float>>; // [token * n_used + rank][n_embd]

// The routed experts of one layer as a ggml graph: up, gate, their product, down.
// The weights come from one of the set_*.
class layer_graph {
  public:
    ggml_cgraph * graph;

    // Each matmul is the sum of `n_terms` matmuls.
    layer_graph(const moe_model & model, const layer_input & input, bool bias = false, size_t n_terms = 1,
                ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type()) :
        model_(model),
        n_terms_(n_terms),
        ctx_(ggml_init({ 1 << 20, nullptr, /* .no_alloc = */ true })),
        weights_(ggml_init({ 1 << 16, nullptr, /* .no_alloc = */ true })),
        placeholders_(ggml_init({ 1 << 16, nullptr, /* .no_alloc = */ true })) {
        ggml_tensor * x   = ggml_new_tensor_3d(ctx_, GGML_TYPE_F32, model.n_embd, 1, input.n_tokens);
        ggml_tensor * ids = ggml_new_tensor_2d(ctx_, GGML_TYPE_I32, input.n_used, input.n_tokens);
        router_           = ggml_new_tensor_3d(ctx_, GGML_TYPE_F32, 1, input.n_used, input.n_tokens);
        ggml_tensor * act;
        if (model.fused) {
            act = ggml_swiglu(ctx_, add_matmul("gate_up", model.n_embd, 2 * model.n_ff, x, ids));
        } else {
            ggml_tensor * gate = add_matmul("gate", model.n_embd, model.n_ff, x, ids);
            gate = model.apart ? ggml_clamp(ctx_, ggml_scale(ctx_, gate, 0.5f), -1.0f, 1.0f) : gate; // in place
            act  = ggml_swiglu_split(ctx_, gate, add_matmul("up", model.n_embd, model.n_ff, x, ids));
        }
        output_             = add_matmul("down", model.n_ff, model.n_embd, act, ids);
        ggml_tensor * added = nullptr;
        if (bias) {
            added   = ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, model.n_embd, model.n_experts);
            output_ = ggml_add_id(ctx_, output_, added, ids);
        }
        graph = ggml_new_graph(ctx_);
        ggml_build_forward_expand(graph, output_);

        buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, buft);
        ggml_backend_tensor_set(x, input.x.data(), 0, ggml_nbytes(x));
        ggml_backend_tensor_set(ids, input.ids.data(), 0, ggml_nbytes(ids));
        ggml_backend_tensor_set(router_, input.weights.data(), 0, ggml_nbytes(router_));
        if (added) {
            const std::vector<float> ones(size_t(ggml_nelements(added)), 1.0f);
            ggml_backend_tensor_set(added, ones.data(), 0, ggml_nbytes(added));
        }
        // what nobody writes must not pass for zeros
        ggml_backend_tensor_memset(output_, 0x7f, 0, ggml_nbytes(output_));
    }

    ~layer_graph() {
        ggml_backend_buffer_free(buffer_);
        ggml_backend_buffer_free(weights_buffer_);
        ggml_free(ctx_);
        ggml_free(weights_);
        ggml_free(placeholders_);
    }

    layer_graph(const layer_graph &)             = delete;
    layer_graph & operator=(const layer_graph &) = delete;

    // `weight` is given the part: "gate", "up", "gate_up" or "down".
    void set_plain(const std::function<plain_weight(const std::string &)> & weight,
                   ggml_backend_buffer_type_t                               buft = ggml_backend_cpu_buffer_type()) {
        set_terms([&](const std::string & part, size_t) { return weight(part); }, buft);
    }

    // `weight` is also given the number of the term.
    void set_terms(const std::function<plain_weight(const std::string &, size_t)> & weight,
                   ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type()) {
        std::vector<plain_weight> contents;
        for (const matmul & m : matmuls_) {
            contents.push_back(weight(m.part, m.term));
            set_weight(m, contents.back().type);
        }
        weights_buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(weights_, buft);
        for (size_t i = 0; i < matmuls_.size(); i++) {
            ggml_backend_tensor_set(matmuls_[i].node->src[0], contents[i].bytes.data(), 0, contents[i].bytes.size());
        }
    }

    // Tensors without memory that stand for experts of the index, and the router's weights, as the model loader and the
    // graph builder make them.
    void set_cached(const hobbit::expert_index & index, uint32_t layer, bool with_router_weights = true) {
        for (const matmul & m : matmuls_) {
            set_cached_weight(m, index.layer(layer).block, with_router_weights);
            m.node->src[0]->extra = const_cast<hobbit::expert_tensor *>(index.find_tensor(m.node->src[0]->name));
        }
    }

    // Tensors in a buffer of the cache's type.
    void set_in_buffer(ggml_backend_buffer_type_t buft, uint32_t block = 0) {
        for (const matmul & m : matmuls_) {
            set_cached_weight(m, block, true);
        }
        weights_buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(weights_, buft);
    }

    rows output() const {
        const size_t       n = size_t(output_->ne[0]);
        std::vector<float> flat(size_t(ggml_nelements(output_)));
        ggml_backend_tensor_get(output_, flat.data(), 0, ggml_nbytes(output_));
        rows out;
        for (size_t i = 0; i < flat.size(); i += n) {
            out.emplace_back(flat.begin() + ptrdiff_t(i), flat.begin() + ptrdiff_t(i + n));
        }
        return out;
    }

  private:
    struct matmul {
        std::string   part;
        size_t        term;
        ggml_tensor * node;
        int64_t       n_in;
        int64_t       n_out;
    };

    // With a weight of the right shape, to be replaced.
    ggml_tensor * add_matmul(const std::string & part, int64_t n_in, int64_t n_out, ggml_tensor * x,
                             ggml_tensor * ids) {
        ggml_tensor * shape = ggml_new_tensor_3d(placeholders_, GGML_TYPE_F32, n_in, n_out, model_.n_experts);
        ggml_tensor * sum   = nullptr;
        for (size_t term = 0; term < n_terms_; term++) {
            ggml_tensor * node = ggml_mul_mat_id(ctx_, shape, x, ids);
            matmuls_.push_back({ part, term, node, n_in, n_out });
            sum = sum ? ggml_add(ctx_, sum, node) : node;
        }
        return sum;
    }

    void set_weight(const matmul & m, ggml_type type) {
        m.node->src[0] = ggml_new_tensor_3d(weights_, type, m.n_in, m.n_out, model_.n_experts);
    }

    void set_cached_weight(const matmul & m, uint32_t block, bool with_router_weights) {
        set_weight(m, model_.high);
        ggml_set_name(m.node->src[0], moe_model::name(block, m.part).c_str());
        m.node->src[3] = with_router_weights ? router_ : nullptr;
    }

    const moe_model       model_;
    const size_t          n_terms_;
    ggml_context *        ctx_;
    ggml_context *        weights_;
    ggml_context *        placeholders_;
    ggml_tensor *         router_ = nullptr;
    ggml_tensor *         output_ = nullptr;
    std::vector<matmul>   matmuls_;
    ggml_backend_buffer_t buffer_         = nullptr;
    ggml_backend_buffer_t weights_buffer_ = nullptr;
};
