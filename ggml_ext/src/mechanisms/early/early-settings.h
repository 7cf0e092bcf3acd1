// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "doors/registered-setting.h"

namespace hobbit {

extern const registered_setting early_setting;      // a flag
extern const registered_setting early_from_setting; // the first layer
extern const registered_counter selections_early;

} // namespace hobbit
