// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace hobbit {

// Settings that a model file, its sidecar or its calibration stores. A later value of a key overrides an earlier one.
struct stored_settings {
    std::vector<std::pair<std::string, double>> numbers;
    std::string                                 policy; // empty: none
};

// Keys of the numbers that a model file may store. It may store hobbit.policy as well.
const std::vector<const char *> & stored_setting_keys();

} // namespace hobbit
