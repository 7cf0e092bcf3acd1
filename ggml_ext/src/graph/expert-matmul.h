// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/inner-graph.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <vector>

namespace hobbit {

// REQUIRES: a matmul over experts.
inline const expert_tensor & expert_of(const ggml_tensor * matmul) {
    return *static_cast<const expert_tensor *>(matmul->src[0]->extra);
}

// The expert's matrix and those that are stacked with it. REQUIRES: the expert is pinned, and the part is loaded.
matrices stack_of(const expert_index & index, const expert_cache & cache, expert_id id, tier_id tier, part_id part);

// Adds matmuls of an outer graph to an inner graph, with the weights of the experts in the cache, and runs the inner
// graph whenever it is full. Experts of one tier and type, at the same offset in their slots, share an operation; it is
// split where it would exceed the scratch memory or ggml's work memory.
//
// Thread-safety: none; see expert_cache.
class expert_matmuls {
  public:
    // Both must outlive the object.
    expert_matmuls(const expert_index & index, const expert_cache & cache) : index_(index), cache_(cache) {}

    // Reserves scratch memory for all matmuls of the layer.
    status reserve(const layer_routing & routing, inner_graph & inner) const;

    // Adds the rows of these uses. REQUIRES: reserve(routing); the experts are pinned and have arrived.
    status add(const ggml_tensor * matmul, const layer_routing & routing, const std::vector<const planned_use *> & uses,
               inner_graph & inner) const;

    // Adds a section's operations on the rows of these uses alone, which row_copies has repeated in this order, and
    // reserves scratch memory for them. REQUIRES: as add
    status add_section(const std::vector<ggml_tensor *> & nodes, layer_id layer,
                       const std::vector<const planned_use *> & uses, inner_graph & inner) const;

  private:
    // Adds the rows of uses whose weights are in one stack, so that they can share an operation.
    status add_alike(const ggml_tensor * matmul, const layer_routing & routing, std::vector<const planned_use *> uses,
                     inner_graph & inner) const;
    size_t max_work_size(tier_id tier) const;

    const expert_index & index_;
    const expert_cache & cache_;
};

} // namespace hobbit
