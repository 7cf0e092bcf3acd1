// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "base/setting-table.h"
#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/inner-graph.h"
#include "model/expert-index.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"

#include <memory>
#include <string>
#include <vector>

namespace hobbit {

class cpu_share;
class predictor;

// A layer whose router has chosen. Valid during the call that passes it.
struct routed_layer {
    const layer_routing & routing;
    const batch_info &    batch;
    ggml_cgraph *         graph;        // outer graph
    int                   first;        // its node with the layer's first matmul over experts
    const ggml_tensor *   router_input; // null: unknown
    inner_graph &         device;
    inner_graph *         cpu; // graph of the CPU's share; null: the CPU has none
};

// The moments of a layer at which a mechanism can act. The executor calls each function of all hooks, in the order of
// their names; by default they do nothing. An error ends the computation for ever.
//
// A layer calls on_routing and adjust once each, and before_rest for each of its sections that the CPU may share.
//
// Thread-safety: none; called by the thread that computes.
class layer_hooks {
  public:
    virtual ~layer_hooks() = default;

    // The router has chosen, and nothing is planned or loaded.
    virtual status on_routing(const routed_layer &) { return {}; }

    // The rule has decided, and better resident versions are taken. May change the precisions of selections and the
    // experts that serve them. Not called in strict mode.
    virtual void adjust(const rule_input & /* in */, std::vector<precision> & /* precisions */,
                        std::vector<int32_t> & /* served */) {}

    // The CPU's share of a section is decided, and the device has computed the section's inputs.
    virtual status before_rest(const routed_layer &) { return {}; }

    // An error or an abort has ended the computation.
    virtual void abandon() {}
};

// Parameters of hooks. All outlives them.
struct hook_parts {
    std::string            name; // name of the mechanism
    const setting_values & settings;
    const expert_index &   index;
    stats &                counters;
    expert_cache &         cache; // cache of the device
    expert_cache *         host;  // its next-level cache; null: none
    predictor *            ahead; // null: no prefetch
    cpu_share *            share; // null: the CPU has none
};

// Makes the hooks of a mechanism for one device, or null while its settings switch it off.
using registered_hooks = registered<layer_hooks, hook_parts>;

// The hooks of all mechanisms that are on.
inline std::vector<std::unique_ptr<layer_hooks>> make_hooks(hook_parts parts) {
    std::vector<std::unique_ptr<layer_hooks>> all;
    for (const std::string & name : registered_hooks::names()) {
        parts.name = name;
        if (auto hooks = registered_hooks::make(parts)) {
            all.push_back(std::move(hooks));
        }
    }
    return all;
}

} // namespace hobbit
