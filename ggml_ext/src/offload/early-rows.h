// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "cache/expert-cache.h"
#include "graph/lazy-backend.h"
#include "offload/cpu-rows.h"
#include "offload/section-copy.h"
#include "predict/predictor.h"

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
class early_rows {
  public:
    // All must outlive the object; `cache` is the device's, `host` its next-level cache.
    early_rows(const expert_index & index, const expert_cache & cache, expert_cache & host, predictor & ahead);
    ~early_rows();

    early_rows(const early_rows &)             = delete;
    early_rows & operator=(const early_rows &) = delete;

    // Keeps how a layer's section computes a row. REQUIRES: cpu_rows::can_share; the section has all parts of the layer
    void learn(const layer_section & section, layer_id layer);

    // Predicts the next layer and begins to compute, once for each running layer. router_input belongs to the outer
    // graph; null where it is not known. REQUIRES: the device has computed it; finish() since the layer before
    status start(const layer_routing & running, const ggml_tensor * router_input, inner_graph & device);

    // Waits for what was started.
    status finish();

    // Whether rows of the use were computed. REQUIRES: finish()
    bool has(const planned_use & use) const { return is_ready_ && rows_.has(use); }

    // REQUIRES: finish()
    const cpu_rows & rows() const { return rows_; }

  private:
    status choose(const layer_routing & running, const ggml_tensor * router_input, inner_graph & device);
    void   release();
    void   work();

    const expert_index & index_;
    const expert_cache & cache_;
    expert_cache &       host_;
    predictor &          ahead_;
    lazy_backend         cpu_;
    cpu_rows             rows_;

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
