// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include <algorithm>

namespace hobbit {

static std::string reason_of(const std::string & rule, const rule_numbers & t) {
    const std::string text = text_of(rule, t);
    return text.empty() ? "all experts in high precision" : text;
}

// The levels under a rule. fitted: the numbers that the model's files store, by key (hobbit.t1, hobbit.fast.t1 ...);
// without them the low tier's type decides. origin: of these numbers, for people.
static quality_levels find_quality_levels(const std::string & rule, const std::map<std::string, double> & fitted,
                                          const char * origin, double low_bits) {
    quality_levels levels;
    levels[0].reason = reason_of(rule, {});
    if (low_bits <= 0.0) {
        levels[1].reason = levels[2].reason = "no low tier, so that all experts are in high precision";
        return levels;
    }
    const rule_traits traits = registered_rule::traits(rule);
    for (const bool is_fast : { false, true }) {
        quality_level & level     = levels[is_fast ? 2 : 1];
        bool            is_fitted = !traits.of_bits;
        level.numbers             = levels[1].numbers; // fast without numbers of its own is no faster
        for (const rule_number * each : numbers_of(rule)) {
            const auto found = fitted.find(std::string(is_fast ? "hobbit.fast." : "hobbit.") + each->spec.option);
            if (found != fitted.end()) {
                level.numbers[*each] = found->second;
                is_fitted            = true;
            }
        }
        if (is_fitted) {
            level.reason = std::string(origin) + ": " + reason_of(rule, level.numbers);
        } else {
            level.numbers = traits.of_bits(low_bits, is_fast);
            level.reason  = format("not calibrated: %s for a low tier of %.2g bits",
                                   reason_of(rule, level.numbers).c_str(), low_bits);
        }
    }
    return levels;
}

std::string settings::precision_number(const std::string & keys) {
    const auto & rows  = setting_table();
    const auto   found = std::find_if(rows.begin(), rows.end(), [&](const auto & row) {
        return find_word(find_setting(QUALITY)->replaced_by, row.key) >= 0 && find_word(keys.c_str(), row.key) >= 0;
    });
    return found == rows.end() ? "" : found->key;
}

status settings::check_quality(const std::string & keys) {
    const std::string number = precision_number(keys);
    return number.empty() || find_word(keys.c_str(), QUALITY) < 0
               ? status()
               : status::error("hobbit.quality chooses the rule and its numbers, and %s is given beside it: leave one "
                               "of them out",
                               number.c_str());
}

status settings::resolve_quality(double low_bits) {
    levels_ = find_quality_levels(rule(), fitted_, is_calibrated_ ? "calibrated" : "stored in the file", low_bits);
    HOBBIT_TRY(is_given(QUALITY) ? apply_quality() : status());
    return check();
}

// Gives the numbers of precision the values that the quality stands for.
status settings::apply_quality() {
    const std::string     word  = text(QUALITY);
    const quality_level & level = levels_[size_t(find_word(QUALITY_WORDS, word))];
    for (const rule_number * each : rule_number::all()) {
        HOBBIT_TRY(set(each->spec.key, level.numbers[*each], HOBBIT_SOURCE_COMPUTED, "the quality's"));
    }
    note(QUALITY, level.reason);
    return {};
}

} // namespace hobbit
