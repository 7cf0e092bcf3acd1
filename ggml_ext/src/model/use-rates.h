// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"

#include <vector>

namespace hobbit {

class expert_index;

// Uses per token of each expert, as the model's calibration counted them; empty where it counted none.
expert_table<float> use_rates(const expert_index & index);

// The experts that are used at all, the most used ones first.
std::vector<expert_id> most_used(const expert_table<float> & rates);

} // namespace hobbit
