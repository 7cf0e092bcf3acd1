// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "hobbit.h"
#include "offload/placement.h"
#include "plan/memory-budget.h"
#include "plan/precision-rule.h"

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace hobbit {

// The meaning of one word of hobbit.quality for one model. reason: for users, where the numbers come from
struct quality_level {
    rule_numbers numbers;
    std::string  reason;
};

constexpr const char * QUALITY = "hobbit.quality";

// The words, by the place of their levels.
constexpr const char * QUALITY_WORDS = "lossless small-loss fast";

using quality_levels = std::array<quality_level, 3>;

// Settings of one model, resolved: every setting has its value, its source, and a note where another setting overrules
// it. Keys, ranges, defaults and meaning: the table in settings.cpp, and rows of other folders (register_setting).
// Adding a setting takes a row. A value that nobody gave and no default has is 0 or "".
class settings : public setting_values {
  public:
    // REQUIRES: a key of the table, of a count or size; of a flag.
    uint64_t count(const char * key) const { return uint64_t(number(key)); }
    bool     flag(const char * key) const { return number(key) != 0.0; }

    rule_numbers          thresholds() const;
    std::array<double, 4> weights() const; // weights of policy hobbit
    compute_mode          mode() const;
    uint64_t              memory() const { return count("hobbit.memory"); } // 0: computed
    uint64_t              pools() const { return count("hobbit.pools"); }   // 0: follows from memory
    const std::string &   device() const { return text("hobbit.device"); }  // empty: the CPU
    const std::string &   policy() const { return text("hobbit.policy"); }
    const std::string &   rule() const { return text("hobbit.rule"); } // a name of registered_rule::names()

    // Applies the caller's settings; an unknown key, a value out of range and one that contradicts another are errors.
    status apply(const hobbit_setting * given, size_t n_given);

    // Fills in what the caller did not give: n_in_model values of the model file, then those of its calibration.
    status apply_stored(const stored_settings & stored, size_t n_in_model = SIZE_MAX);

    // Finds what the words of hobbit.quality mean, and applies the one that is given. low_bits: of a weight in the low
    // tier, 0 without one. REQUIRES: apply_stored() comes before, where a file stores settings
    status resolve_quality(double low_bits);

    // Changes live settings. A number that is changed alone moves the one that limits it, or that it limits, where it
    // must. An error leaves the settings unusable.
    status change(const hobbit_setting * changes, size_t n_changes);

    // Checks that need the devices: rows of settings have them, and the settings of memory. on_cpu: no other computes.
    status check_placed(bool is_apart, bool on_cpu) const;

    // See hobbit_get_settings.
    void describe(hobbit_resolved_setting * rows, size_t n_rows) const;

    // Keys that a model file or its calibration may hold.
    static std::vector<std::string> stored_keys();

    budget bounds() const;

    // System memory to leave free if the pools' size is computed: other programs may compute theirs at the same time.
    uint64_t spare_memory() const { return memory() == 0 && pools() == 0 ? 128u << 20 : 0; }

    // Returns true if the caller asked for the cache: expressly, by a size, threshold, mode, placement, device or file.
    bool asked() const;

  private:
    double      low_share() const; // negative: follows from the thresholds
    std::string note_on(const std::string & key) const;
    bool        is_overruled(const std::string & key, const std::string & rule) const;

    const rule_number * number_of_another_rule() const;

    // The first setting among the keys that hobbit.quality sets, or "".
    static std::string precision_number(const std::string & keys);

    static status check_quality(const std::string & keys); // keys: that are given together
    status        apply_quality();
    status        move_limits(const std::string & keys);
    status        derive();
    status        check() const;

    quality_levels                levels_;
    std::map<std::string, double> fitted_; // numbers that files store, by key
    bool                          is_calibrated_ = false;
};

} // namespace hobbit
