// SPDX-License-Identifier: MIT
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace hobbit {

// Settings that a model file, its sidecar or its calibration stores, by key. A later value of a key overrides an
// earlier one.
using stored_settings = std::vector<std::pair<std::string, std::variant<double, std::string>>>;

} // namespace hobbit
