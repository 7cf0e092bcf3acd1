// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "doors/registered-setting.h"
#include "hobbit.h"
#include "model/stored-settings.h"
#include "offload/placement.h"
#include "plan/memory-budget.h"
#include "plan/precision-rule.h"

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

// Settings of one model. Keys, ranges, defaults and meaning: the table in settings.cpp, which the constructor applies.
// Adding a setting takes a field here and a row there.
struct settings {
    settings();

    // behaviour
    bool             enable;
    bool             calibrated;
    bool             remember;
    score_thresholds thresholds;
    bool             strict;
    std::string      rule; // a name of rule_names()
    std::string      sidecar;
    std::string      trace;
    std::string      device; // empty: the CPU

    // performance
    std::string           policy;
    std::array<double, 4> weights;
    uint32_t              prefetch;
    std::string           predictor;
    uint64_t              memory        = 0; // 0: computed
    uint64_t              pools         = 0; // 0: follows from memory
    uint64_t              device_memory = 0; // 0: computed
    compute_mode          mode;
    double                low_share = -1.0; // negative: follows from the thresholds
    bool                  pack;
    uint32_t              io_threads;
    uint32_t              read_timeout; // seconds

    registered_values registered; // of mechanisms

    // Applies the caller's settings; an unknown key or a value out of range is an error.
    status apply(const hobbit_setting * given, size_t n_given);

    // Replaces the numbers of the rule. An error leaves the settings unusable.
    status set_thresholds(const score_thresholds & t);

    // Fills in what is stored, where the caller gave nothing.
    status apply_stored(const stored_settings & stored);

    // Keys that a model file or its calibration may hold.
    static std::vector<std::string> stored_keys();

    budget bounds() const { return { memory, pools, device_memory, low_share, low_demand() }; }

    // Of the system's memory, where the pools' size is computed: other programs may have computed theirs at the same
    // time.
    uint64_t spare_memory() const { return memory == 0 && pools == 0 ? 128u << 20 : 0; }

    // Whether the caller asked for the cache: expressly, by a size, threshold, mode, device or file.
    bool asked() const;

    bool names_mode() const { return is_given("hobbit.mode"); }

  private:
    double low_demand() const;
    bool   is_given(const std::string & key) const { return given_.count(key) > 0; }
    bool   weights_given() const;
    bool   thresholds_given() const;
    bool   names_rank() const { return is_given("hobbit.rule") && rule == "rank"; }
    status apply_one(const hobbit_setting & setting);
    status check() const;

    std::set<std::string> given_; // keys
};

} // namespace hobbit
