// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include <algorithm>

namespace hobbit {

// Prices above the calibrated one where the calibration has none for `fast`: the divergence grows about as fast.
static constexpr double FAST_PRICES = 4.0;

// From this precision on, a low tier costs little: docs/quality.md has the divergences.
static constexpr double FINE_BITS = 4.0;

static std::string text_of(const score_thresholds & t) {
    return t.price > 0.0 ? format("price %.3g", t.price)
           : t.t1 < 1.0  ? format("t1 %.3g, t2 %.3g", t.t1, t.t2)
                         : "all experts in high precision";
}

static quality_level of_type(double low_bits, bool is_fast) {
    const bool             is_fine = low_bits >= FINE_BITS;
    const double           t1      = is_fast ? (is_fine ? 0.3 : 0.6) : (is_fine ? 0.6 : 0.7);
    const score_thresholds t       = { t1, is_fast ? 0.9 : 1.0 };
    return { t, format("not calibrated: %s for a low tier of %.2g bits", text_of(t).c_str(), low_bits) };
}

quality_levels find_quality_levels(const std::string & rule, const std::map<std::string, double> & fitted,
                                   double low_bits) {
    const auto has = [&](const std::string & key) { return fitted.count("hobbit." + key) > 0; };
    const auto get = [&](const std::string & key, double other) {
        return has(key) ? fitted.at("hobbit." + key) : other;
    };
    const bool       priced = takes_price(rule);
    score_thresholds small, fast;
    if (priced) {
        small.price = get("price", 0.0);
        fast.price  = get("fast.price", FAST_PRICES * small.price);
    } else {
        small = { get("t1", 1.0), get("t2", 1.0) };
        fast  = { get("fast.t1", 1.0), get("fast.t2", 1.0) };
    }
    quality_levels levels;
    const bool     is_fitted  = priced || has("t1");
    const bool     knows_fast = priced || has("fast.t1");
    levels[0].reason          = text_of({});
    if (low_bits <= 0.0) {
        levels[1].reason = levels[2].reason = "no low tier, so that all experts are in high precision";
        return levels;
    }
    levels[1] = is_fitted ? quality_level{ small, "calibrated: " + text_of(small) } : of_type(low_bits, false);
    levels[2] = knows_fast ? quality_level{ fast, "calibrated: " + text_of(fast) } : of_type(low_bits, true);
    return levels;
}

std::string settings::precision_number(const std::string & keys) {
    const auto & rows  = setting_table();
    const auto   found = std::find_if(rows.begin(), rows.end(), [&](const auto & row) {
        return find_word(QUALITY_NUMBERS, row.key) >= 0 && find_word(keys.c_str(), row.key) >= 0;
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
    levels_ = find_quality_levels(rule(), fitted_, low_bits);
    HOBBIT_TRY(values_.is_given(QUALITY) ? apply_quality() : status());
    return check();
}

// Gives the numbers of precision the values that the quality stands for.
status settings::apply_quality() {
    const std::string     word  = values_.text(QUALITY);
    const quality_level & level = levels_[size_t(find_word(QUALITY_WORDS, word))];
    for (const auto & [key, value] : { std::pair("hobbit.t1", level.numbers.t1),
                                       { "hobbit.t2", level.numbers.t2 },
                                       { "hobbit.price", level.numbers.price },
                                       { "hobbit.confidence", 0.0 } }) {
        HOBBIT_TRY(values_.set(key, value, HOBBIT_SOURCE_COMPUTED, "the quality's"));
    }
    values_.note(QUALITY, level.reason);
    return {};
}

} // namespace hobbit
