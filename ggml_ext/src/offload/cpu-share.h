// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "cache/expert-cache.h"
#include "doors/row-source.h"
#include "graph/inner-graph.h"
#include "model/expert-index.h"
#include "offload/cpu-rows.h"
#include "offload/placement.h"
#include "plan/layer-plan.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace hobbit {

// Rows that were computed before their layer runs, which the CPU's share takes instead of computing them. They are of
// layers that run for a single token.
class ready_rows {
  public:
    virtual ~ready_rows() = default;

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
class cpu_share final : public row_source {
  public:
    // All must outlive the object. `cache` is the device's, `host` its next-level cache.
    cpu_share(const expert_index & index, expert_cache & cache, expert_cache & host, double upload_share,
              compute_mode mode, stats & stats);
    ~cpu_share() override { cache_.set_replacement_listener(nullptr); }

    // Takes rows from here where it has them. The source must outlive the object's last use.
    void take_from(ready_rows * source) { source_ = source; }

    // Asks for the layer's input if it may soon be needed: the CPU has computed rows lately.
    void before_routing(next_layer & next) override;

    // Decides who computes which use of the plan.
    void begin_layer(const running_layer & layer, inner_graph & device) override;

    bool computes(const planned_use & use) const override { return on_cpu_[index_of(use)]; }

    bool shares_sections() const override { return true; }

    // Pins the CPU's experts in host memory, requests missing parts, and copies the section's inputs but for `known`.
    void begin_section(const layer_section & section, const host_copy & known, inner_graph & device) override;

    bool has_all() const override {
        return has_rows() && pinned_.size() == plan_->uses.size() && plan_->skipped.empty();
    }

    // Returns true if the layer's time on the device is a sample.
    bool is_measured() const override { return is_as_placed_ && placement_.measures_device(); }

    std::vector<int32_t> open_rows() const override {
        return has_rows() && !has_all() ? rows_.all() : std::vector<int32_t>();
    }

    bool   is_due() const override { return has_rows() && !rows_.is_done(); }
    status compute_next(const inner_graphs & on) override;

    // Uploads the CPU's rows behind what the device computes.
    status end_section(inner_graph & device) override;

    void end_layer(inner_graph & device) override;
    void abandon() override { release(); }

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

    bool has_rows() const { return !pinned_.empty(); } // the CPU computes some of the section

    bool pin(const planned_use & use);
    void release();

    const expert_index & index_;
    expert_cache &       cache_;
    expert_cache &       host_;
    stats &              stats_;
    placement            placement_;
    cpu_rows             rows_; // rows of the current section
    ready_rows *         source_ = nullptr;
    loader::transfers    link_;   // already counted by the placement
    clock::time_point    passed_; // already counted by the placement
    bool                 has_warned_ = false;

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
