// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace hobbit {

static constexpr double   MAX_BYTES    = 1e18; // of any size, and of any other number
static constexpr uint32_t MAX_PREFETCH = 4;

static constexpr const char * WEIGHT_KEYS[] = { "hobbit.w_lru", "hobbit.w_lfu", "hobbit.w_lhu", "hobbit.w_fld" };

static bool is_weight(const std::string & key) {
    return std::find(std::begin(WEIGHT_KEYS), std::end(WEIGHT_KEYS), key) != std::end(WEIGHT_KEYS);
}

static std::string join(const std::vector<std::string> & names) {
    std::string all;
    for (const std::string & name : names) {
        all += (all.empty() ? "" : ", ") + name;
    }
    return all;
}

// Numbers that change what is computed or how fast, and that calibration may find.
status settings::apply_calibrated(const std::string & key, double value) {
    if (key == "hobbit.low_share") {
        low_share = value;
    } else if (key == "hobbit.t1") {
        thresholds.t1 = value;
    } else if (key == "hobbit.t2") {
        thresholds.t2 = value;
    } else if (key == "hobbit.prefetch") {
        prefetch = uint32_t(std::min(value, 1e6)); // check() has the real bound
    } else if (is_weight(key)) {
        weights[std::find(std::begin(WEIGHT_KEYS), std::end(WEIGHT_KEYS), key) - std::begin(WEIGHT_KEYS)] = value;
    } else {
        return status::error(format("unknown setting %s", key.c_str()));
    }
    return {};
}

status settings::apply_number(const std::string & key, double value) {
    if (!std::isfinite(value) || value < 0) {
        return status::error(format("setting %s must not be negative", key.c_str()));
    }
    if (value > MAX_BYTES) {
        return status::error(format("setting %s is too large (%g)", key.c_str(), value));
    }
    if (key == "hobbit.enable") {
        enable = value != 0;
    } else if (key == "hobbit.calibrated") {
        calibrated = value != 0;
    } else if (key == "hobbit.strict") {
        strict = value != 0;
    } else if (key == "hobbit.memory") {
        memory = uint64_t(value);
    } else if (key == "hobbit.pools") {
        pools = uint64_t(value);
    } else if (key == "hobbit.device_memory") {
        device_memory = uint64_t(value);
    } else if (key == "hobbit.pack") {
        pack = value != 0;
    } else if (key == "hobbit.io_threads") {
        io_threads = uint32_t(std::min(value, 1e6)); // check() has the real bound
    } else {
        if (is_weight(key) && !weights_given()) {
            weights = {}; // who gives one of them means all
        }
        return apply_calibrated(key, value);
    }
    return {};
}

status settings::apply_mode(const std::string & value) {
    static const std::map<std::string, compute_mode> modes = {
        { "gpu", compute_mode::gpu },
        { "cooperative", compute_mode::cooperative },
        { "auto", compute_mode::automatic },
    };
    const auto found = modes.find(value);
    if (found == modes.end()) {
        return status::error(format("setting hobbit.mode is 'gpu', 'cooperative' or 'auto', not '%s'", value.c_str()));
    }
    mode = found->second;
    return {};
}

status settings::apply_text(const std::string & key, const char * value) {
    if (key == "hobbit.sidecar") {
        sidecar = value;
    } else if (key == "hobbit.trace") {
        trace = value;
    } else if (key == "hobbit.device") {
        device = value;
    } else if (key == "hobbit.mode") {
        return apply_mode(value);
    } else if (key == "hobbit.policy") {
        policy = value;
    } else if (key == "hobbit.scorer") {
        scorer = value;
    } else {
        return status::error(format("setting %s takes a number, not the text '%s'", key.c_str(), value));
    }
    return {};
}

status settings::apply(const hobbit_setting * given, size_t n_given) {
    static const std::set<std::string> texts = { "hobbit.sidecar", "hobbit.trace",  "hobbit.device",
                                                 "hobbit.mode",    "hobbit.policy", "hobbit.scorer" };
    for (size_t i = 0; i < n_given; i++) {
        const hobbit_setting & setting = given[i];
        const std::string      key     = setting.key;
        status                 s;
        if (setting.kind == HOBBIT_SETTING_STRING) {
            s = apply_text(key, setting.s);
        } else if (texts.count(key)) {
            s = status::error(format("setting %s takes a text", key.c_str()));
        } else if (key == "hobbit.tag" && setting.kind == HOBBIT_SETTING_INT) {
            tag = setting.i; // all 64 bits of it
        } else if (key == "hobbit.tag") {
            s = status::error("setting hobbit.tag takes a whole number");
        } else {
            s = apply_number(key, setting.kind == HOBBIT_SETTING_FLOAT ? setting.f : double(setting.i));
        }
        if (!s.ok()) {
            return s;
        }
        given_.insert(key);
    }
    if (is_given("hobbit.t2") && !is_given("hobbit.t1")) {
        thresholds.t1 = std::min(1.0, thresholds.t2);
    }
    if (weights_given() && !is_given("hobbit.policy")) {
        policy = "hobbit";
    } else if (weights_given() && policy != "hobbit") {
        return status::error(
            format("w_lru, w_lfu, w_lhu and w_fld are of the policy 'hobbit', not of '%s'", policy.c_str()));
    }
    return check();
}

bool settings::weights_given() const {
    return std::any_of(std::begin(WEIGHT_KEYS), std::end(WEIGHT_KEYS), [&](const char * k) { return is_given(k); });
}

status settings::apply_stored(const stored_settings & stored) {
    const bool given_thresholds = is_given("hobbit.t1") || is_given("hobbit.t2");
    const bool given_policy     = is_given("hobbit.policy") || weights_given();
    for (const auto & [key, value] : stored.numbers) {
        const bool is_threshold = key == "hobbit.t1" || key == "hobbit.t2";
        if (is_given(key) || (is_threshold && given_thresholds) || (is_weight(key) && given_policy)) {
            continue;
        }
        if (!std::isfinite(value) || value < 0) {
            return status::error(format("%s is %g, not a number from 0 on", key.c_str(), value));
        }
        const status s = apply_calibrated(key, value);
        if (!s.ok()) {
            return s;
        }
    }
    if (!stored.policy.empty() && !given_policy) {
        policy = stored.policy;
    }
    return check();
}

status settings::check() const {
    if (thresholds.t1 > thresholds.t2) {
        return status::error(
            format("t1 (%g) must not be above t2 (%g): an expert is loaded in low precision before it is "
                   "skipped",
                   thresholds.t1, thresholds.t2));
    }
    if (thresholds.t2 > 1.0) {
        return status::error(
            format("t2 (%g) must not be above 1: scores are sums of weights normalised to 1", thresholds.t2));
    }
    if (low_share > 1.0) {
        return status::error(format("low_share (%g) must not be above 1", low_share));
    }
    if (!make_rule(scorer)) {
        return status::error(format("there is no precision rule '%s' for hobbit.scorer: choose one of %s",
                                    scorer.c_str(), join(rule_names()).c_str()));
    }
    const auto & names = policy_names();
    if (std::find(names.begin(), names.end(), policy) == names.end()) {
        return status::error(
            format("there is no eviction policy '%s': choose one of %s", policy.c_str(), join(names).c_str()));
    }
    double sum = 0;
    for (const double w : weights) {
        sum += w >= 0 ? w : NAN;
    }
    if (!(std::fabs(sum - 1.0) < 1e-6)) {
        return status::error(format("the weights w_lru, w_lfu, w_lhu and w_fld sum to %g: they must sum to 1, none of "
                                    "them negative",
                                    sum));
    }
    if (prefetch > MAX_PREFETCH) {
        return status::error(format("prefetch (%u) looks at most %u layers ahead", prefetch, MAX_PREFETCH));
    }
    if (io_threads < 1 || io_threads > 256) {
        return status::error(format("io_threads (%u) must lie between 1 and 256", io_threads));
    }
    return {};
}

} // namespace hobbit
