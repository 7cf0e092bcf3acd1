// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "doors/registered-setting.h"

namespace hobbit {

extern const registered_setting degrade_setting; // a flag
extern const registered_counter selections_replaced;

} // namespace hobbit
