// SPDX-License-Identifier: MIT
#pragma once

#include "graph/routing.h"

#include <vector>

namespace hobbit {

class hits_ahead; // computes a layer before the host knows its experts

// The layer that runs, as it was planned for all of its matmuls.
struct running_layer {
    layer_routing       routing;
    layer_plan          plan;
    const ggml_tensor * router_input = nullptr; // null: unknown
    part_set            done;                   // parts computed, those of the current stage included
    hits_ahead *        ahead = nullptr;        // launched the layer; null: nothing was launched
};

// The graphs that a split of the outer graph is computed in.
struct inner_graphs {
    inner_graph & device;
    inner_graph * cpu; // null: the device is the CPU
};

// A layer whose router's choice is about to be read.
struct next_layer {
    const layer_section & section;
    layer_id              layer;
    const ggml_tensor *   matmul; // the section's first
    inner_graph &         device;
    bool                  may_launch;            // nobody reads later what the layer overwrites
    const ggml_tensor *   also        = nullptr; // read in the same wait
    hits_ahead *          ahead       = nullptr; // launches the layer in that wait
    bool                  wants_input = false;   // the matmul's input is read, too
};

// Gives rows of a layer beside those that the executor multiplies by experts in the device's cache, or sees to it that
// experts are there in time. The executor calls each function of all sources, in the order of their list.
//
// Thread-safety: none; called by the thread that computes.
class row_source {
  public:
    virtual ~row_source() = default;

    virtual void before_routing(next_layer &) {}
    virtual void after_routing(const next_layer &, const char * /* bytes of next.also */) {}

    // The router has chosen; nothing is decided or loaded for the layer yet.
    virtual void on_routing(const layer_routing &) {}

    // The layer is planned. It lives until end_layer.
    virtual void begin_layer(const running_layer &, inner_graph & /* device */) {}

    // Sections begin where any source shares them. The device has computed their inputs, of which `known` was read.
    virtual bool shares_sections() const { return false; }
    virtual void begin_section(const layer_section &, const host_copy & /* known */, inner_graph & /* device */) {}

    virtual bool is_measured() const { return false; } // a launched layer is computed again, for a sample of its time
    virtual bool computes(const planned_use &) const { return false; }
    virtual bool has_all() const { return false; } // computes the whole section

    // Rows that this source computes of a section of which others compute some.
    virtual std::vector<int32_t> open_rows() const { return {}; }

    // Computes the next rows that are due while the device runs launched work.
    virtual bool   is_due() const { return false; }
    virtual status compute_next(const inner_graphs &) { return {}; }

    // All experts that the layer needs are pinned and requested.
    virtual status look_ahead(const running_layer &, ggml_backend_t) { return {}; }

    // Starts what the device has still to compute of the section. REQUIRES: no rows are due
    virtual status end_section(inner_graph & /* device */) { return {}; }

    virtual void end_layer(inner_graph & /* device */) {} // it is completely computed
    virtual void abandon() {}                             // after an error
};

} // namespace hobbit
