// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "doors/row-source.h"
#include "ggml-cpp.h"
#include "graph/expert-matmul.h"
#include "graph/inner-graph.h"
#include "graph/routing.h"
#include "model/expert-index.h"
#include "plan/layer-plan.h"

#include <cstdint>
#include <vector>

namespace hobbit {

// Computes the experts of one token's layer before the host knows which ones its router chose: the device looks up
// their slots in a table. So it computes while the host reads the choice and plans. An expert that is not resident gets
// the slot of another one, and its rows are wrong until the expert was uploaded, or the CPU has computed them.
//
// Thread-safety: none; see expert_cache.
class hits_ahead final : public row_source {
  public:
    // Both must outlive the object.
    hits_ahead(const expert_index & index, expert_cache & cache) :
        index_(index), cache_(cache), products_(index, cache) {}

    void before_routing(next_layer & next) override {
        next.ahead = next.may_launch && can_launch(next.section, next.device) ? this : nullptr;
    }

    // Also pins an expert that stands for missing ones.
    status launch(inner_graph & inner);

    // Pins what the launched layer reads of those chosen, and returns all pins, which end once the device is past it.
    std::vector<expert_id> take_pins(const layer_routing & routing);

    // Returns true if rows of the use are right: each of its selections was looked up and found.
    bool has(const planned_use & use, const layer_routing & routing) const;

    // Computes rows of these uses in place of the wrong ones. REQUIRES: their experts are there, and pinned
    status launch_missing(const layer_routing & routing, const std::vector<const planned_use *> & uses,
                          inner_graph & inner);

    // Puts the layer's input back, which the layer may have overwritten: it can be computed once more.
    void undo(inner_graph & inner) { move_input(inner, saved_, input_); }

  private:
    static constexpr int32_t NONE = -1;

    // Returns true if the section's layer can be computed so, all of it in this graph.
    bool can_launch(const layer_section & section, inner_graph & inner);
    bool reserve(ggml_backend_t backend);
    bool look_for_experts();
    void place_copies();
    void move_input(inner_graph & inner, const ggml_tensor * from, const ggml_tensor * to);

    const expert_index & index_;
    expert_cache &       cache_;
    const expert_matmuls products_;
    bool                 is_refused_ = false; // the device refuses it, or the experts' types do

    ggml_context_ptr           ctx_;
    ggml_backend_buffer_ptr    memory_; // has these tensors:
    std::vector<ggml_tensor *> tables_; // [layer], numbers of slots by expert
    ggml_tensor *              numbers_ = nullptr;
    ggml_tensor *              saved_   = nullptr; // the layer's input
    ggml_backend_buffer_ptr    images_;            // the tables in host memory; each changes after its copy has ended
    ggml_backend_buffer_ptr    places_;            // places of rows of missing experts

    // the layer
    std::vector<const ggml_tensor *> nodes_; // nodes of its section, without no-ops
    layer_id                         layer_;
    const ggml_tensor *              input_ = nullptr;
    std::vector<int32_t>             table_; // [expert]; NONE: not found
    expert_id                        standing_in_ = {};
    ggml_tensor                      from_, to_; // views of an input that is moved
    row_copies                       copies_;    // copies of the section, for missing experts
};

} // namespace hobbit
