// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-cpp.h"
#include "graph/inner-graph.h"
#include "model/expert.h"
#include "plan/layer-plan.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

namespace hobbit {

// Matmuls over experts of one layer that can run together: gate and up, or down.
struct stage {
    std::vector<const ggml_tensor *> matmuls;
    part_set                         parts;
};

// The stage that begins with the matmul at node `first`. Sets `end` to the node behind it.
stage next_stage(ggml_cgraph * graph, int first, int & end);

// The nodes [first, end) of an outer graph. They belong to one layer, and the first one is a matmul over experts.
struct layer_section {
    ggml_cgraph * graph = nullptr;
    int           first = 0;
    int           end   = 0;
    part_set      parts = {}; // parts of its matmuls
};

// The section that begins with the matmul at node `first`. It ends with the graph, or at the next matmul of another
// layer or of a part that the section has already.
layer_section section_at(ggml_cgraph * graph, int first);

// The sources with rows, one or two, of a matmul over experts or an operation that may stand between two: bias,
// per-expert scale, clamp, activation. 0: it is no such operation.
size_t n_row_sources(const ggml_tensor * node);

// The nodes of a section, without no-ops.
inline std::vector<const ggml_tensor *> nodes_of(const layer_section & section) {
    std::vector<const ggml_tensor *> nodes;
    for (int i = section.first; i < section.end; i++) {
        if (!is_noop(ggml_graph_node(section.graph, i))) {
            nodes.push_back(ggml_graph_node(section.graph, i));
        }
    }
    return nodes;
}

// Tensors of these that none of the nodes behind them reads.
inline std::vector<const ggml_tensor *> results_of(const std::vector<const ggml_tensor *> & nodes) {
    std::vector<const ggml_tensor *> results;
    for (auto made = nodes.begin(); made != nodes.end(); made++) {
        const auto is_it = [&](const ggml_tensor * source) { return source && root_of(source) == root_of(*made); };
        const auto reads = [&](const ggml_tensor * node) {
            return std::any_of(node->src, node->src + GGML_MAX_SRC, is_it);
        };
        if (std::none_of(made + 1, nodes.end(), reads)) {
            results.push_back(*made);
        }
    }
    return results;
}

// A tensor, and its bytes in host memory.
struct host_copy {
    const ggml_tensor * tensor = nullptr; // null: none
    std::vector<char>   bytes;
};

// Reads which experts the router chose for a MUL_MAT_ID over experts, and their weights from src[3]. The weights stay
// empty if src[3] is missing or has another shape. Fails if an id is not an expert.
// `input`, if not null, gets the matmul's input, and *more the address of the bytes of another tensor, if `also` names
// one; all are read in the same wait. `inner` counts the copies. For `meanwhile` see inner_graph::read.
// Thread-safety: different graphs may be read at once.
status read_routing(const ggml_tensor * matmul, layer_id layer, layer_routing & routing, inner_graph & inner,
                    host_copy * input, const ggml_tensor * also = nullptr, const char ** more = nullptr,
                    const std::function<void()> & meanwhile = nullptr);

// A section's operations, repeated on some of its rows. The caller gives the tensors memory, and values to those that
// the section does not compute.
//
// Thread-safety: none.
class row_copies {
  public:
    // Each tensor gets so many rows, at ne[1] or at ne[2].
    void begin(size_t n_nodes, int64_t ne1, int64_t ne2) {
        ne1_ = ne1;
        ne2_ = ne2;
        copies_.clear();
        ctx_.reset(
            ggml_init({ (TENSORS_PER_NODE * n_nodes + 1) * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    }

    ggml_context * ctx() const { return ctx_.get(); }

    // Stands for the outer tensor.
    void set(const ggml_tensor * outer, ggml_tensor * copy) { copies_[outer] = copy; }

    // The copy of an outer tensor; a view where its root has a copy.
    ggml_tensor * of(const ggml_tensor * outer) {
        ggml_tensor *& copy = copies_[outer];
        if (copy) {
            return copy;
        }
        const auto root = outer->view_src ? copies_.find(outer->view_src) : copies_.end();
        if (root == copies_.end()) {
            copy = ggml_new_tensor_3d(ctx_.get(), outer->type, outer->ne[0], ne1_, ne2_);
        } else {
            ggml_tensor * from = root->second;
            copy = ggml_view_3d(ctx_.get(), from, outer->ne[0], ne1_, ne2_, from->nb[1], from->nb[2], outer->view_offs);
        }
        return copy;
    }

    // Repeats a node. A matmul keeps its weights, which say which experts.
    ggml_tensor * repeat(const ggml_tensor * node) {
        const bool    is_matmul = node->op == GGML_OP_MUL_MAT_ID;
        ggml_tensor * copy      = of(node);
        copy->op                = node->op;
        std::memcpy(copy->op_params, node->op_params, sizeof(copy->op_params));
        for (int i = 0; i < (is_matmul ? 2 : GGML_MAX_SRC); i++) {
            const bool is_kept = !node->src[i] || (is_matmul && i == 0);
            copy->src[i]       = is_kept ? node->src[i] : of(node->src[i]);
        }
        return copy;
    }

  private:
    static constexpr size_t TENSORS_PER_NODE = 4; // a repeated node brings at most so many

    int64_t                                      ne1_ = 0;
    int64_t                                      ne2_ = 0;
    ggml_context_ptr                             ctx_;
    std::map<const ggml_tensor *, ggml_tensor *> copies_; // [outer]
};

} // namespace hobbit
