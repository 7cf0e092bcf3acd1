// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/inner-graph.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// REQUIRES: a matmul over experts.
inline const expert_tensor & expert_of(const ggml_tensor * matmul) {
    return *static_cast<const expert_tensor *>(matmul->src[0]->extra);
}

// Adds matmuls of an outer graph to an inner one, computed from the experts in the cache, and runs the inner graph
// whenever it is full. Experts of one tier and type, at the same place in their slots, are one operation, or as many as
// keep each within the scratch memory and ggml's work memory. Of an expert that is a sum, the first term's product is
// written and the other one added to it.
//
// Thread-safety: none; see expert_cache.
class expert_matmuls {
  public:
    // Both must outlive the object.
    expert_matmuls(const expert_index & index, const expert_cache & cache) : index_(index), cache_(cache) {}

    // Scratch memory for all matmuls of the layer.
    status reserve(const layer_routing & routing, inner_graph & inner) const;

    // The rows of these uses. REQUIRES: reserve; the uses are of the layer, pinned and there.
    status add(const ggml_tensor * matmul, const layer_routing & routing, const std::vector<const planned_use *> & uses,
               inner_graph & inner) const;

  private:
    // A batch's rows in one matmul that take part in the same operation, or in several.
    struct alike_rows {
        const ggml_tensor *              matmul;
        const layer_routing &            routing;
        matrices                         weights;
        term_id                          term;
        bool                             adds; // to what the rows hold
        std::vector<const planned_use *> uses;
    };

    status add_term(const ggml_tensor * matmul, const layer_routing & routing,
                    const std::vector<const planned_use *> & uses, size_t number, inner_graph & inner) const;
    status add_alike(alike_rows alike, inner_graph & inner) const;
    size_t max_work_size(term_id term) const;

    const expert_index & index_;
    const expert_cache & cache_;
};

} // namespace hobbit
