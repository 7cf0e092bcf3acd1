// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"
#include "model/stored-settings.h"
#include "offload/placement.h"
#include "plan/memory-budget.h"
#include "plan/precision-rule.h"
#include "policy/cache-policy.h"

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace hobbit {

// Settings of one model, meaning as listed at struct hobbit_setting.
struct settings {
    // behaviour
    bool             enable     = false;
    bool             calibrated = true; // a calibration beside the model counts
    score_thresholds thresholds;
    bool             strict = false;
    std::string      scorer = "gate"; // a name of rule_names()
    std::string      sidecar;
    std::string      trace;
    std::string      device; // as ggml names it; empty: the CPU
    int64_t          tag = 0;

    // performance
    std::string           policy        = "echo";
    std::array<double, 4> weights       = policy_options().weights;
    uint32_t              prefetch      = 2;
    uint64_t              memory        = 0;                       // 0: computed
    uint64_t              pools         = 0;                       // 0: follows from memory
    uint64_t              device_memory = 0;                       // of a device with memory of its own; 0: computed
    compute_mode          mode          = compute_mode::automatic; // beside a device with memory of its own
    double                low_share     = -1.0;                    // negative: follows from the thresholds
    bool                  pack          = true;
    uint32_t              io_threads    = 4;

    // Applies the caller's settings; an unknown key or a value out of range is an error.
    status apply(const hobbit_setting * given, size_t n_given);

    // Fills in what is stored, where the caller gave nothing.
    status apply_stored(const stored_settings & stored);

    // The bounds on memory.
    budget bounds() const { return { memory, pools, device_memory, low_share, thresholds.t1 }; }

    // Whether the caller asked for the cache, expressly, by one of its sizes or thresholds or for a trace.
    bool asked() const {
        return enable || is_given("hobbit.memory") || is_given("hobbit.pools") || is_given("hobbit.t1") ||
               is_given("hobbit.t2") || is_given("hobbit.device_memory") || names_mode() || !device.empty() ||
               !sidecar.empty() || !trace.empty();
    }

    bool names_mode() const { return is_given("hobbit.mode"); }

  private:
    bool   is_given(const std::string & key) const { return given_.count(key) > 0; }
    bool   weights_given() const;
    status apply_mode(const std::string & value);
    status apply_text(const std::string & key, const char * value);
    status apply_number(const std::string & key, double value);
    status apply_calibrated(const std::string & key, double value);
    status check() const;

    std::set<std::string> given_; // keys
};

} // namespace hobbit
