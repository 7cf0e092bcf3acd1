// SPDX-License-Identifier: MIT
#include "mechanisms/early/section-copy.h"

#include <cstring>
#include <map>

namespace hobbit {

class section_copier {
  public:
    section_copier(const layer_section & section, section_copy & to) : section_(section), to_(to) {
        const size_t n = size_t(section.end - section.first);
        to.ctx_.reset(ggml_init({ 3 * n * ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr,
                                  /* .no_alloc = */ true }));
        to.graph_ = ggml_new_graph_custom(to.ctx_.get(), n, false);
    }

    bool run() {
        for (int i = section_.first; i < section_.end; i++) {
            copies_[ggml_graph_node(section_.graph, i)] = nullptr;
        }
        for (int i = section_.first; i < section_.end; i++) {
            ggml_graph_add_node(to_.graph_, copy(ggml_graph_node(section_.graph, i)));
        }
        return n_inputs_ == 1 && is_row(*to_.input_);
    }

  private:
    ggml_tensor * duplicate(const ggml_tensor * t) {
        ggml_tensor * same = ggml_new_tensor(to_.ctx_.get(), t->type, GGML_MAX_DIMS, t->ne);
        std::memcpy(same->nb, t->nb, sizeof(same->nb));
        return copies_[t] = same;
    }

    ggml_tensor * copy(const ggml_tensor * node) {
        if (copies_[node]) {
            return copies_[node];
        }
        ggml_tensor * same = duplicate(node);
        same->op           = node->op;
        same->flags        = node->flags;
        std::memcpy(same->op_params, node->op_params, sizeof(same->op_params));
        if (node->view_src) {
            same->view_src  = source(node->view_src);
            same->view_offs = node->view_offs;
        }
        const bool is_matmul = node->op == GGML_OP_MUL_MAT_ID;
        const bool is_bias   = node->op == GGML_OP_ADD_ID;
        for (int i = 0; i < (is_matmul ? 3 : GGML_MAX_SRC); i++) {
            if (is_matmul && i == 0) {
                same->src[i] = weights(node->src[i]);
            } else if (is_bias && i == 1) {
                same->src[i] = node->src[i]; // the model's
            } else if (node->src[i]) {
                same->src[i] = (is_matmul || is_bias) && i == 2 ? ids(node->src[i]) : source(node->src[i]);
            }
        }
        return same;
    }

    // Without memory in any case: they say which layer and part it is.
    ggml_tensor * weights(const ggml_tensor * t) {
        ggml_tensor * same = duplicate(t);
        same->extra        = t->extra;
        return same;
    }

    // Which experts compute is said anew each time.
    ggml_tensor * ids(const ggml_tensor * t) { return copies_.count(t) > 0 ? copies_[t] : duplicate(t); }

    ggml_tensor * source(const ggml_tensor * t) {
        const auto found = copies_.find(t);
        if (found != copies_.end()) {
            return found->second ? found->second : copy(t);
        }
        n_inputs_++;
        return to_.input_ = duplicate(t);
    }

    static bool is_row(const ggml_tensor & input) {
        return input.type == GGML_TYPE_F32 && ggml_nrows(&input) == 1 && ggml_is_contiguous(&input);
    }

    const layer_section                          section_;
    section_copy &                               to_;
    std::map<const ggml_tensor *, ggml_tensor *> copies_; // [outer]; null: of the section, not copied yet
    int                                          n_inputs_ = 0;
};

std::unique_ptr<section_copy> section_copy::make(const layer_section & section) {
    auto copy = std::make_unique<section_copy>();
    return section_copier(section, *copy).run() ? std::move(copy) : nullptr;
}

} // namespace hobbit
