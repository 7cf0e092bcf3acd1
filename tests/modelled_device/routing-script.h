// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-impl.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

namespace modelled {

// The routing of a model whose values are skipped: writes the routers' choices, their weights, and what a predictor
// would say of the next layers, to where a graph would have computed them.
//
// Thread-safety: none; one context.
class routing_script {
  public:
    // [n_rows][n_layers][n_used]; must outlive the script. Each token takes the next row, from the first one again
    // after the last.
    struct table {
        const int32_t * experts   = nullptr; // null: nothing is written
        const float *   weights   = nullptr;
        int64_t         n_rows    = 0;
        int64_t         n_layers  = 0;
        int64_t         n_used    = 0;
        int64_t         n_experts = 0;
    };

    void use(const table & t) {
        table_ = t;
        next_  = 0;
    }

    // The graph's nodes are computed now.
    void write(const ggml_cgraph * graph) {
        for (int i = 0; i < graph->n_nodes && table_.experts; i++) {
            write(graph->nodes[i]);
        }
    }

  private:
    // Shares of right guesses 1 to 4 layers ahead, as docs/results/method.md has them.
    static constexpr double accuracy[] = { 0.874, 0.832, 0.797, 0.771 };

    static int64_t layer_of(const ggml_tensor * t, const char * prefix) {
        const size_t length = std::strlen(prefix);
        int          layer  = -1;
        return std::strncmp(t->name, prefix, length) == 0 && std::sscanf(t->name + length, "%d", &layer) == 1 ? layer
                                                                                                              : -1;
    }

    template <typename T>
    T at(const T * values, int64_t row, int64_t layer, int64_t rank) const {
        return values[((row % table_.n_rows) * table_.n_layers + layer % table_.n_layers) * table_.n_used + rank];
    }

    template <typename T>
    static void put(ggml_tensor * t, int64_t column, int64_t row, T value) {
        std::memcpy(static_cast<char *>(t->data) + row * int64_t(t->nb[1]) + column * int64_t(t->nb[0]), &value,
                    sizeof(value));
    }

    void write(ggml_tensor * t) {
        const int64_t layer = layer_of(t, "ffn_moe_argsort-");
        if (layer >= 0) {
            first_ = layer == 0 ? next_ : first_;
            next_  = layer == 0 ? next_ + t->ne[1] : next_;
            layer_ = layer;
            for (int64_t i = 0; i < t->ne[1]; i++) {
                for (int64_t k = 0; k < table_.n_used; k++) {
                    put(t, k, i, at(table_.experts, next_ - t->ne[1] + i, layer, k));
                }
            }
        } else if (std::strncmp(t->name, "ffn_moe_weights", 15) == 0 && ggml_is_contiguous(t) &&
                   ggml_nelements(t) % table_.n_used == 0) {
            auto * values = static_cast<float *>(t->data);
            for (int64_t i = 0; i < ggml_nelements(t); i++) {
                values[i] = at(table_.weights, first_ + i / table_.n_used, layer_, i % table_.n_used);
            }
        } else if (t->op == GGML_OP_MUL_MAT && std::strncmp(t->src[0]->name, "leaf_", 5) == 0 &&
                   t->ne[0] % table_.n_experts == 0) { // all other weights have a name
            predict(t);
        }
    }

    // Outputs of the routers of the next layers: high ones for experts that they will choose, or for others.
    void predict(ggml_tensor * t) {
        for (int64_t i = 0; i < t->ne[1]; i++) {
            for (int64_t e = 0; e < t->ne[0]; e++) {
                put(t, e, i, 0.0f);
            }
            for (int64_t n = 0; n < t->ne[0] / table_.n_experts; n++) {
                for (int64_t k = 0; k < table_.n_used; k++) {
                    const bool is_right = chance_(random_) < accuracy[n < 4 ? n : 3];
                    const auto any      = int64_t(chance_(random_) * double(table_.n_experts));
                    const auto chosen   = int64_t(at(table_.experts, first_ + i, layer_ + 1 + n, k));
                    put(t, n * table_.n_experts + (is_right ? chosen : any), i, float(2 * table_.n_used - k));
                }
            }
        }
    }

    table                                  table_;
    int64_t                                next_  = 0; // row of the next token
    int64_t                                first_ = 0; // row of the running tokens
    int64_t                                layer_ = 0; // the running one
    std::mt19937                           random_{ 1 };
    std::uniform_real_distribution<double> chance_{ 0, 1 };
};

} // namespace modelled
