// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"
#include "scorer.h"
#include "status.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace hobbit {

// Settings of one model, meaning as listed at struct hobbit_setting.
struct settings {
    // behaviour
    bool             enable = false;
    score_thresholds thresholds;
    std::string      sidecar;
    int64_t          tag = 0;

    // performance
    uint64_t memory     = 0;    // 0: computed
    uint64_t pools      = 0;    // 0: follows from memory
    double   low_share  = -1.0; // negative: follows from the thresholds
    uint32_t io_threads = 4;

    // Applies the caller's settings; an unknown key or a value out of range is an error.
    status apply(const hobbit_setting * given, size_t n_given);

    // Fills in what a model file stores, where the caller gave nothing.
    status apply_stored(const std::vector<std::pair<std::string, double>> & stored);

    // Whether the caller asked for the cache, expressly or by one of its sizes or thresholds.
    bool asked() const { return enable || given_memory || given_thresholds || !sidecar.empty(); }

    bool given_memory     = false;
    bool given_thresholds = false;

  private:
    status apply_number(const std::string & key, double value);
    status check() const;

    bool given_low_share_ = false;
    bool given_t1_        = false;
};

// Keys that a model file may store.
const std::vector<const char *> & stored_setting_keys();

} // namespace hobbit
