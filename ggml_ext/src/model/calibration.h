// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "model/expert.h"
#include "model/gguf-file.h"

#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

class expert_index;

// The file that `pyhobbit calibrate` writes beside a model (docs/format.md). Every field may be empty.
struct calibration {
    std::vector<int32_t> uses;       // uses of each expert in the text, [layer][expert]
    std::vector<float>   low_costs;  // for the rule "price" (precision_costs); as stored, not checked
    std::vector<float>   skip_costs; // for the rule "price" too
    std::vector<int32_t> paths;      // for predictors, see each_path
    stored_settings      settings;

    // Reads the file, if there is one. Fails if it is not of this model.
    status read(const std::string & model_path, const expert_index & index,
                const std::vector<std::string> & setting_keys);
};

// The values that the file stores for these keys.
stored_settings find_settings(const gguf_file & file, const std::vector<std::string> & keys);

// Uses per token of each expert, as the model's calibration counted them; empty where it counted none.
expert_table<float> use_rates(const expert_index & index);

// The experts that are used at all, the most used ones first.
std::vector<expert_id> most_used(const expert_table<float> & rates);

} // namespace hobbit
