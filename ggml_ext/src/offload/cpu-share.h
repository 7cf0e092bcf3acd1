// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/inner-graph.h"
#include "model/expert-shapes.h"
#include "offload/awake-threads.h"
#include "offload/bypass-estimate.h"
#include "offload/cost-model.h"
#include "offload/cpu-rows.h"
#include "plan/layer-plan.h"

#include <chrono>
#include <cstdint>
#include <set>
#include <vector>

namespace hobbit {

// The CPU's share of a layer whose other experts a device computes: what the cost model places there of the experts
// that are not in the device's memory is computed where it lies in host memory, whole or but for the last product.
// Experts for which host memory has no slot left stay with the device. What a layer took corrects the model.
//
// Thread-safety: none; see expert_cache.
class cpu_share {
  public:
    // All must outlive the object. `cache` is the device's, `host` is below it.
    cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_shapes & kinds,
              const cost_model & costs, stats & stats);
    ~cpu_share();

    cpu_share(const cpu_share &)             = delete;
    cpu_share & operator=(const cpu_share &) = delete;

    // Further misses that computing an expert on the CPU causes; see bypass_estimate.
    double further_misses() const { return bypasses_.further_misses(); }

    // Decides who computes which use of the plan. Plan and routing must live until end_layer.
    void begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device);

    // Whether the CPU computes those parts of the plan's use.
    bool computes(const planned_use & use, part_set parts) const {
        const computed_by by = placed(use);
        return by == computed_by::cpu || (by == computed_by::split && !(parts & part_id::down));
    }

    bool is_split(const planned_use & use) const { return placed(use) == computed_by::split; }

    // Pins in host memory what the CPU computes, asks for those of `parts` that are missing there, and copies what the
    // section reads. REQUIRES: the device has computed that.
    void begin_section(const layer_section & section, part_set parts);

    // Whether there are rows of the section that the CPU computes, in part or whole, or those that it begins.
    bool has_rows() const { return begun_.has_rows || whole_.has_rows; }
    bool has_rows_to_hand_over() const { return begun_.has_rows; }

    // Whether the CPU has still to compute some of them.
    bool is_due() const { return is_due_to_hand_over() || whole_.is_due(); }
    bool is_due_to_hand_over() const { return begun_.is_due(); }

    // Computes some of them, while the device runs what was launched; first what it hands over. REQUIRES: is_due()
    status compute_next(inner_graph & cpu);

    // Brings the rows that the CPU has begun to the device. REQUIRES: they are not due; the device has computed the
    // section, but for the last product.
    status hand_over(inner_graph & device);

    // Brings the CPU's other rows to the device. REQUIRES: they are not due; the device has computed the section.
    status end_section(inner_graph & device);

    // `output` is the layer's. REQUIRES: all of the layer is computed.
    void end_layer(const ggml_tensor * output, inner_graph & device, inner_graph & cpu);

    // After an error.
    void abandon() { release(); }

  private:
    using clock   = std::chrono::steady_clock;
    using seconds = std::chrono::duration<double>;

    // Until the layer began.
    struct readings {
        clock::time_point        time;
        std::chrono::nanoseconds device{ 0 };
        uint64_t                 bytes_read = 0;
    };

    // Of the section in hand.
    struct rows_in_hand {
        cpu_rows                         rows;
        part_set                         parts    = {};
        bool                             has_rows = false; // to bring to the device
        std::vector<const planned_use *> pinned   = {};    // in host memory, until the section ends

        bool is_due() const { return has_rows && !rows.is_done(); }
    };

    computed_by & placed(const planned_use & use) { return placement_.by[size_t(&use - plan_->uses.data())]; }
    computed_by   placed(const planned_use & use) const { return placement_.by[size_t(&use - plan_->uses.data())]; }

    bool   pin(const planned_use & use);
    void   begin_rows(rows_in_hand & some, const layer_section & section, int end, part_set parts);
    status compute_next(rows_in_hand & some, inner_graph & cpu);
    status bring_rows(rows_in_hand & some, inner_graph & device);
    void   release();
    void   place_otherwise(const planned_use & use, computed_by by);
    void   learn_link();
    void   bring();

    const expert_index &  index_;
    expert_cache &        cache_;
    expert_cache &        host_;
    const expert_shapes & kinds_;
    cost_model            costs_;
    stats &               stats_;
    bypass_estimate       bypasses_; // of the device's pools
    section_inputs        inputs_;
    rows_in_hand          begun_; // of experts that are split
    rows_in_hand          whole_;
    awake_threads         awake_;
    std::set<uint32_t>    unshared_; // layers that the CPU cannot share
    std::set<uint32_t>    unsplit_;  // layers whose last product is in a section of its own
    loader::transfers     link_;     // that the model knows of

    // the layer in hand
    const layer_routing *             routing_ = nullptr;
    const layer_plan *                plan_    = nullptr;
    std::vector<expert_work>          work_;      // [use]
    cost_model::placement             placement_; // [use]
    std::vector<bypass_estimate::use> uses_;      // [use]
    readings                          began_;
    seconds                           cpu_time_{ 0 };
    bool                              is_as_placed_ = true;
};

} // namespace hobbit
