// SPDX-License-Identifier: MIT
#pragma once

#include "awake-threads.h"
#include "cost-model.h"
#include "expert-cache.h"
#include "expert-kinds.h"
#include "host-rows.h"
#include "inner-graph.h"
#include "layer-plan.h"
#include "stats.h"
#include "status.h"

#include <chrono>
#include <cstdint>
#include <set>
#include <vector>

namespace hobbit {

// The CPU's share of a layer whose other experts a device computes: what the cost model places there of the experts
// that are not in the device's memory is computed where it lies in host memory. Experts for which host memory has no
// slot left stay with the device. What a layer took corrects the model.
//
// Thread-safety: none; see expert_cache.
class cpu_share {
  public:
    // All must outlive the object. `cache` is the device's, `host` is below it.
    cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_kinds & kinds,
              const cost_model & costs, stats & stats);

    // Decides who computes which use of the plan. Plan and routing must live until end_layer.
    void begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device);

    // Whether the CPU computes the plan's use.
    bool has(const planned_use & use) const { return placement_.on_cpu[size_t(&use - plan_->uses.data())]; }

    // Pins in host memory what the CPU computes, asks for those of `parts` that are missing there, and copies what the
    // section reads. REQUIRES: the device has computed that.
    void begin_section(const layer_section & section, uint32_t parts);

    // Whether there are rows of the section that the CPU computes.
    bool has_rows() const { return has_rows_; }

    // Whether the CPU has still to compute its rows of the section.
    bool is_due() const { return !pinned_.empty(); }

    // Computes some of them, while the device runs what was launched. REQUIRES: is_due()
    status compute_next(inner_graph & cpu);

    // Brings the CPU's rows to the device. REQUIRES: they are not due; the device has computed the section.
    status end_section(inner_graph & device);

    // `output` is the layer's. REQUIRES: all of the layer is computed.
    void end_layer(const ggml_tensor * output, inner_graph & device, inner_graph & cpu);

    // After an error.
    void abandon();

  private:
    using clock   = std::chrono::steady_clock;
    using seconds = std::chrono::duration<double>;

    // Until the layer began.
    struct readings {
        clock::time_point        time;
        std::chrono::nanoseconds device{ 0 };
        uint64_t                 bytes_read = 0;
    };

    bool pin(const planned_use & use);
    void release();
    void learn_link();
    void bring();

    const expert_index & index_;
    expert_cache &       cache_;
    expert_cache &       host_;
    const expert_kinds & kinds_;
    cost_model           costs_;
    stats &              stats_;
    host_rows            rows_;
    awake_threads        awake_;
    std::set<uint32_t>   unshared_;   // layers that the CPU cannot share
    loader::transfers    link_;       // that the model knows of
    uint64_t             n_told_ = 0; // layers that a prediction could be told of

    // the layer in hand
    const layer_routing *    routing_ = nullptr;
    const layer_plan *       plan_    = nullptr;
    std::vector<expert_work> work_;      // [use]
    cost_model::placement    placement_; // [use]
    readings                 began_;
    seconds                  cpu_time_{ 0 };
    bool                     is_as_placed_ = true;
    bool                     has_rows_     = false; // to bring to the device, of the section in hand
    uint32_t                 parts_        = 0;     // of the section in hand

    std::vector<const planned_use *> pinned_; // in host memory, until all of them are computed
};

} // namespace hobbit
