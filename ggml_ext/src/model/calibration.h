// SPDX-License-Identifier: MIT
#pragma once

#include "base/setting-table.h"
#include "base/status.h"
#include "model/expert.h"
#include "model/gguf-file.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace hobbit {

// An entry of the activation paths that a calibration stores (docs/format.md): of n_tokens that chose `now` in the
// layer before `layer`, and `before` in the one before that, how many chose each of some experts in `layer`. Without
// `before` it is of all tokens that chose the one expert in `now`, and without either of all tokens.
struct stored_path {
    uint32_t        layer;
    uint8_t         n_tokens; // at least 1
    const int32_t * now;
    size_t          n_now;
    const int32_t * before;
    size_t          n_before;
    const int32_t * next; // 256 times the expert, and its tokens, of which there are at most n_tokens
    size_t          n_next;
};

using path_visit = std::function<void(const stored_path &)>;

// Calls visit for each entry in the values of hobbit.paths. Returns false, perhaps after some, where they are damaged
// or name experts that a model lacks. n_experts: [layer]
bool each_path(const std::vector<int32_t> & values, const std::vector<uint32_t> & n_experts, const path_visit & visit);

class expert_index;

// The file that `pyhobbit calibrate` writes beside a model (docs/format.md). Every field may be empty.
struct calibration {
    std::vector<int32_t> uses;       // uses of each expert in the text, [layer][expert]
    std::string          costs_rule; // the rule that the costs were measured for; empty: there are none
    std::vector<float>   low_costs;  // precision_costs; as stored, not checked
    std::vector<float>   skip_costs;
    std::vector<int32_t> paths; // for predictors, see each_path
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
