// SPDX-License-Identifier: MIT
#include "settings.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

static constexpr double MAX_BYTES = 1e18; // of any size, and of any other number

const std::vector<const char *> & stored_setting_keys() {
    static const std::vector<const char *> keys = { "hobbit.t1", "hobbit.t2", "hobbit.low_share" };
    return keys;
}

static status number_of(const hobbit_setting & given, double & value) {
    if (given.kind == HOBBIT_SETTING_STRING) {
        return status::error(format("setting %s takes a number, not the text '%s'", given.key, given.s));
    }
    value = given.kind == HOBBIT_SETTING_FLOAT ? given.f : double(given.i);
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
    } else if (key == "hobbit.memory") {
        memory       = uint64_t(value);
        given_memory = true;
    } else if (key == "hobbit.pools") {
        pools        = uint64_t(value);
        given_memory = true;
    } else if (key == "hobbit.low_share") {
        low_share        = value;
        given_low_share_ = true;
    } else if (key == "hobbit.t1") {
        thresholds.t1    = value;
        given_thresholds = given_t1_ = true;
    } else if (key == "hobbit.t2") {
        thresholds.t2    = value;
        given_thresholds = true;
    } else if (key == "hobbit.io_threads") {
        io_threads = uint32_t(std::min(value, 1e6)); // check() has the real bound
    } else {
        return status::error(format("unknown setting %s", key.c_str()));
    }
    return {};
}

status settings::apply(const hobbit_setting * given, size_t n_given) {
    for (size_t i = 0; i < n_given; i++) {
        const std::string key = given[i].key;
        if (key == "hobbit.sidecar") {
            if (given[i].kind != HOBBIT_SETTING_STRING) {
                return status::error("setting hobbit.sidecar takes a file name");
            }
            sidecar = given[i].s;
            continue;
        }
        if (key == "hobbit.tag") {
            if (given[i].kind != HOBBIT_SETTING_INT) {
                return status::error("setting hobbit.tag takes a whole number");
            }
            tag = given[i].i; // all 64 bits of it
            continue;
        }
        double value = 0;
        status s     = number_of(given[i], value);
        if (s.ok()) {
            s = apply_number(key, value);
        }
        if (!s.ok()) {
            return s;
        }
    }
    if (given_thresholds && !given_t1_) {
        thresholds.t1 = std::min(1.0, thresholds.t2);
    }
    return check();
}

status settings::apply_stored(const std::vector<std::pair<std::string, double>> & stored) {
    for (const auto & [key, value] : stored) {
        if (key == "hobbit.low_share" && !given_low_share_) {
            low_share = value;
        } else if (key == "hobbit.t1" && !given_thresholds) {
            thresholds.t1 = value;
        } else if (key == "hobbit.t2" && !given_thresholds) {
            thresholds.t2 = value;
        }
    }
    return check();
}

status settings::check() const {
    if (!(thresholds.t1 >= 0.0) || !(thresholds.t2 >= 0.0) || std::isnan(low_share)) { // stored in a damaged file
        return status::error("t1, t2 and low_share must be numbers that are not negative");
    }
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
    if (io_threads < 1 || io_threads > 256) {
        return status::error(format("io_threads (%u) must lie between 1 and 256", io_threads));
    }
    return {};
}

} // namespace hobbit
