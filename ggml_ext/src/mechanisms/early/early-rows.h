// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "doors/layer-hooks.h"
#include "graph/lazy-backend.h"
#include "mechanisms/early/section-copy.h"
#include "offload/cpu-rows.h"
#include "offload/row-source.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hobbit {

// DAOP's pre-calculation (DATE 2025, section IV-C). While a layer runs for a single token, a thread computes the
// experts that the next layer is predicted to use and that host memory has and the device lacks. Their input is the
// running layer's router input in place of the next one's, which is approximate. The rows serve where that layer's
// router then chooses the expert.
//
// Thread-safety: none; the thread only computes graphs that the caller has built.
class early_rows final : public layer_hooks, public row_source {
  public:
    // REQUIRES: the parts have a host cache, a predictor and a share, which then takes rows from here
    explicit early_rows(const hook_parts & parts);
    ~early_rows() override;

    early_rows(const early_rows &)             = delete;
    early_rows & operator=(const early_rows &) = delete;

    void             learn(const layer_section & section, layer_id layer) override;
    const cpu_rows * rows() override { return is_ready_ ? &rows_ : nullptr; }
    void             took(size_t n_uses) override;

    // Waits for the rows of this layer.
    status on_routing(const routed_layer &) override { return finish(); }

    // Predicts the next layer and begins to compute, once for each running layer.
    status before_rest(const routed_layer & layer) override;

    void abandon() override { finish(); } // its error, if any, is of no use now

  private:
    status finish();
    status choose(const routed_layer & layer);
    void   set_n_threads(const inner_graph * cpu);
    void   release();
    void   work();

    const hook_parts parts_;
    lazy_backend     cpu_;
    cpu_rows         rows_;

    std::vector<std::unique_ptr<section_copy>> sections_; // [layer]; null: not known
    std::vector<layer_routing>                 predictions_;
    std::vector<planned_use>                   uses_; // pinned in host memory
    bool                                       is_started_ = false;
    bool                                       is_ready_   = false;

    std::mutex              mutex_;
    std::condition_variable changed_;
    bool                    is_due_   = false; // guarded by mutex_, as are the next two
    bool                    is_ended_ = false;
    status                  result_;
    std::thread             thread_;
};

} // namespace hobbit
