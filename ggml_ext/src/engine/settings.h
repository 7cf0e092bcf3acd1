// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "doors/registered-setting.h"
#include "hobbit.h"
#include "model/stored-settings.h"
#include "offload/placement.h"
#include "plan/memory-budget.h"
#include "plan/precision-rule.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

// Settings of one model, resolved: every setting has its value, its source, and a note where another setting overrules
// it. Keys, ranges, defaults and meaning: the table in settings.cpp, and rows of other folders (register_settings),
// which have no member here. Adding a setting takes a row there and, for a core setting, a member here.
// Invariant: members equal values().
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
    std::string      timeline;
    std::string      device; // empty: the CPU

    // performance
    std::string           policy;
    std::array<double, 4> weights;
    uint32_t              prefetch;
    std::string           predictor;
    uint64_t              memory        = 0; // 0: computed
    uint64_t              pools         = 0; // 0: follows from memory
    uint64_t              further       = 0; // 0: hobbit.memory has room for one context
    uint64_t              device_memory = 0; // 0: computed
    compute_mode          mode;
    double                low_share = -1.0; // negative: follows from the thresholds
    bool                  pack;
    uint32_t              io_threads;
    uint32_t              read_timeout; // seconds
    uint32_t              snapshots;
    uint32_t              least_snapshots;

    registered_values registered; // values of mechanisms

    // Applies the caller's settings; an unknown key, a value out of range and one that contradicts another are errors.
    status apply(const hobbit_setting * given, size_t n_given);

    // Fills in what is stored, where the caller gave nothing. The first n_in_model values are of the model file, the
    // others of its calibration.
    status apply_stored(const stored_settings & stored, size_t n_in_model = SIZE_MAX);

    // Changes live settings; of t1 and t2 one that is changed alone moves the other where t1 would be above t2. An
    // error leaves the settings unusable.
    status change(const hobbit_setting * changes, size_t n_changes);

    // Keeps what was computed for a setting that nobody gives. REQUIRES: a value of the row's type
    void compute(const std::string & key, const setting_value & value, const std::string & note);

    // Checks that need the devices: rows of settings have them, and the settings of memory.
    status check_placed(bool is_apart) const;

    const setting_values & values() const { return values_; }

    // See hobbit_get_settings.
    void describe(hobbit_resolved_setting * rows, size_t n_rows) const;

    // Keys that a model file or its calibration may hold.
    static std::vector<std::string> stored_keys();

    budget bounds() const {
        return { memory, pools, device_memory, low_share, low_demand(), snapshots, least_snapshots };
    }

    // System memory to leave free if the pools' size is computed: other programs may compute theirs at the same time.
    uint64_t spare_memory() const { return memory == 0 && pools == 0 ? 128u << 20 : 0; }

    // Returns true if the caller asked for the cache: expressly, by a size, threshold, mode, device or file.
    bool asked() const;

  private:
    double      low_demand() const;
    std::string note_on(const std::string & key) const;
    double      own_threshold() const;
    bool        is_overruled(const std::string & key, const std::string & rule) const;
    status      derive();
    status      check() const;
    void        bind();

    setting_values values_;
};

} // namespace hobbit
