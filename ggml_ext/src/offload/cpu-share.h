// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/inner-graph.h"
#include "model/expert-shapes.h"
#include "offload/cpu-rows.h"
#include "offload/placement.h"
#include "plan/layer-plan.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace hobbit {

// Rows that were computed before their layer runs, which the CPU's share takes instead of computing them. They are of
// layers that run for a single token.
class row_source {
  public:
    virtual ~row_source() = default;

    // How a layer computes its rows. The section has all parts of the layer, and the CPU can share it.
    virtual void learn(const layer_section & section, layer_id layer) = 0;

    // The rows for the layer that begins; null: there are none.
    virtual const cpu_rows * rows() = 0;

    // So many uses of the layer took their rows from rows().
    virtual void took(size_t n_uses) = 0;
};

// The CPU's share of a layer whose other experts a device computes. The placement chooses among the experts that are
// missing on the device. The CPU computes these from host memory; some of them are uploaded afterwards, in the
// background. An expert for which host memory has no free slot stays with the device.
//
// Thread-safety: none; see expert_cache.
class cpu_share {
  public:
    // All must outlive the object. `cache` is the device's, `host` its next-level cache.
    cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, const expert_shapes & kinds,
              double upload_share, compute_mode mode, stats & stats);
    ~cpu_share() { cache_.set_replacement_listener(nullptr); }

    // Takes rows from here where it has them. The source must outlive the object's last use.
    void set_row_source(row_source * source) { source_ = source; }

    // Decides who computes which use of the plan. Plan and routing must live until end_layer. is_ahead: see placement
    void begin_layer(const layer_routing & routing, const layer_plan & plan, bool is_ahead, inner_graph & device);

    // Returns true if the CPU has computed rows lately, and may soon need a layer's input again.
    bool expects_rows() const { return n_layers_without_ < 2 * index_.n_layers(); }

    // Returns true if the CPU computes a use of the plan.
    bool computes(const planned_use & use) const { return on_cpu_[index_of(use)]; }

    // Pins the CPU's experts in host memory, requests their missing parts, and copies the section's inputs but for
    // `known`. REQUIRES: the device has computed these inputs.
    void begin_section(const layer_section & section, const host_copy & known, inner_graph & device);

    // Returns true if the CPU computes rows of the section, or all of them: then the device has nothing to compute.
    bool has_rows() const { return !pinned_.empty(); }
    bool has_all() const { return has_rows() && pinned_.size() == plan_->uses.size() && plan_->skipped.empty(); }

    // Returns true if the layer's time on the device is a sample.
    bool is_measured() const { return is_as_placed_ && placement_.measures_device(); }

    // The CPU's rows of the section, and whether some of them are not computed yet.
    const std::vector<int32_t> & rows() const { return rows_.all(); }
    bool                         is_due() const { return has_rows() && !rows_.is_done(); }

    // Computes the next piece while the device runs launched work. REQUIRES: is_due()
    status compute_next(inner_graph & cpu);

    // Starts what the device has still to compute of the section, and the upload of the CPU's rows behind it. REQUIRES:
    // the rows are not due
    status end_section(inner_graph & device);

    // REQUIRES: the layer is completely computed
    void end_layer(inner_graph & device);

    // Drops the layer after an error.
    void abandon() { release(); }

    // See placement.
    std::vector<hobbit_latency> latencies() const { return placement_.latencies(); }

  private:
    using clock   = std::chrono::steady_clock;
    using seconds = std::chrono::duration<double>;

    size_t   index_of(const planned_use & use) const { return size_t(&use - plan_->uses.data()); }
    part_set all_parts() const { return index_.layer(routing_->layer).parts; }

    // Rows of this layer that exist already; null: none.
    const cpu_rows * ready() const { return source_ && routing_->n_tokens == 1 ? source_->rows() : nullptr; }

    bool is_ready(const planned_use & use) const { return ready() && ready()->has(use); }

    bool pin(const planned_use & use);
    void release();

    const expert_index &  index_;
    expert_cache &        cache_;
    expert_cache &        host_;
    const expert_shapes & kinds_;
    stats &               stats_;
    placement             placement_;
    cpu_rows              rows_; // rows of the current section
    row_source *          source_ = nullptr;
    loader::transfers     link_;   // already counted by the placement
    clock::time_point     passed_; // already counted by the placement
    bool                  has_warned_ = false;

    // the current layer
    const layer_routing *            routing_ = nullptr;
    const layer_plan *               plan_    = nullptr;
    std::vector<expert_work>         work_;   // [use]
    cpu_experts                      on_cpu_; // [use]
    part_set                         parts_;  // parts of the current section
    std::vector<const planned_use *> pinned_; // in host memory until the section ends
    seconds                          cpu_time_{ 0 };
    std::chrono::nanoseconds         device_before_{ 0 };
    bool                             is_as_placed_     = true;
    uint32_t                         n_layers_without_ = 0; // up to this one, without rows of the CPU's
};

} // namespace hobbit
