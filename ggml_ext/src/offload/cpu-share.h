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

// The CPU's share of a layer whose other experts a device computes. The cost model chooses among the experts that are
// missing on the device. The CPU computes these from host memory, completely or without the last product. An expert for
// which host memory has no free slot stays with the device. The measured time of each layer corrects the cost model.
//
// Thread-safety: none; see expert_cache.
class cpu_share {
  public:
    // All must outlive the object. `cache` is the device's, `host` its next-level cache.
    cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_shapes & kinds,
              const cost_model & costs, stats & stats);
    ~cpu_share();

    cpu_share(const cpu_share &)             = delete;
    cpu_share & operator=(const cpu_share &) = delete;

    // Further misses that computing an expert on the CPU causes; see bypass_estimate.
    double further_misses() const { return bypasses_.further_misses(); }

    // Decides who computes which use of the plan. Plan and routing must live until end_layer.
    void begin_layer(const layer_routing & routing, const layer_plan & plan, inner_graph & device);

    // Whether the CPU computes these parts of a use of the plan.
    bool computes(const planned_use & use, part_set parts) const {
        const computed_by by = placed(use);
        return by == computed_by::cpu || (by == computed_by::split && !(parts & part_id::down));
    }

    bool is_split(const planned_use & use) const { return placed(use) == computed_by::split; }

    // Pins the CPU's experts in host memory, requests their missing `parts`, and copies the section's inputs. REQUIRES:
    // the device has computed these inputs.
    void begin_section(const layer_section & section, part_set parts);

    // Whether the CPU computes rows of the section; whether some of them belong to split experts.
    bool has_rows() const { return begun_.has_rows || whole_.has_rows; }
    bool has_rows_to_hand_over() const { return begun_.has_rows; }

    // Whether some of these rows are not computed yet.
    bool is_due() const { return is_due_to_hand_over() || whole_.is_due(); }
    bool is_due_to_hand_over() const { return begun_.is_due(); }

    // Computes the next piece while the device runs launched work. Rows of split experts come first. REQUIRES: is_due()
    status compute_next(inner_graph & cpu);

    // Uploads the rows of split experts. REQUIRES: they are not due; the device has computed the section up to the last
    // product.
    status hand_over(inner_graph & device);

    // Uploads the CPU's other rows. REQUIRES: they are not due; the device has computed the section.
    status end_section(inner_graph & device);

    // `output` is the layer's output. REQUIRES: the layer is completely computed.
    void end_layer(const ggml_tensor * output, inner_graph & device, inner_graph & cpu);

    // After an error.
    void abandon() { release(); }

  private:
    using clock   = std::chrono::steady_clock;
    using seconds = std::chrono::duration<double>;

    // Clocks and counters at the start of the layer.
    struct readings {
        clock::time_point        time;
        std::chrono::nanoseconds device{ 0 };
        uint64_t                 bytes_read = 0;
    };

    // The rows of the current section.
    struct rows_in_hand {
        cpu_rows                         rows;
        part_set                         parts    = {};
        bool                             has_rows = false; // to upload
        std::vector<const planned_use *> pinned   = {};    // in host memory until the section ends

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
    rows_in_hand          begun_; // of split experts
    rows_in_hand          whole_;
    awake_threads         awake_;
    std::set<uint32_t>    unshared_; // layers that the CPU cannot share
    std::set<uint32_t>    unsplit_;  // layers whose last product is in a section of its own
    loader::transfers     link_;     // already counted by the cost model

    // the current layer
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
