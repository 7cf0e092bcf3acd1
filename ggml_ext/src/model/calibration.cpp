// SPDX-License-Identifier: MIT
#include "model/calibration.h"

#include "model/expert-index.h"
#include "model/sidecar.h"
#include "model/stored-paths.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

namespace hobbit {

// Fails unless the file was made for these bytes of the model and of its tiers.
static status check_sizes(const gguf_file & file, const std::string & model_path, const expert_index & index) {
    uint64_t   size  = 0;
    const auto other = [&](const std::string & what) {
        return status::error("the calibration '%s' was made for another %s of '%s': calibrate it again with pyhobbit "
                             "calibrate, or remove the file",
                             file.path().c_str(), what.c_str(), model_path.c_str());
    };
    file.find_u64("hobbit.model_bytes", size);
    if (size != index.model_bytes()) {
        return other("version");
    }
    for (const tier_id tier : TIERS) {
        const std::string name = tier_name(tier);
        if (file.find_u64("hobbit." + name + "_bytes", size) && size != index.tier_bytes(tier)) {
            return other(name + " tier");
        }
    }
    return {};
}

status calibration::read(const std::string & model_path, const expert_index & index,
                         const std::vector<std::string> & setting_keys) {
    const std::string name = beside_model(model_path, ".calibration.gguf");
    std::error_code   ignored;
    if (!std::filesystem::exists(name, ignored)) {
        return {};
    }
    gguf_file    file;
    const status s       = file.open(name);
    const auto   damaged = [&](const std::string & why) {
        return status::error("'%s' cannot be used%s: calibrate '%s' again, or remove it", name.c_str(), why.c_str(),
                               model_path.c_str());
    };
    if (!s.ok()) {
        return file.was_read() ? damaged(": " + s.message()) : s;
    }
    if (!file.has("hobbit.model_bytes")) {
        return damaged("");
    }
    HOBBIT_TRY(check_sizes(file, model_path, index));
    if (file.find_ints("hobbit.expert_uses", uses) &&
        (uses.size() != index.n_layers() * index.n_experts() ||
         std::any_of(uses.begin(), uses.end(), [](int32_t n) { return n < 0; }))) {
        return damaged(": it does not count the uses of this model's experts");
    }
    if (file.find_ints("hobbit.paths", paths) &&
        !each_path(paths, index.experts_by_layer(), [](const stored_path &) {})) {
        return damaged(": its activation paths are not of this model's experts");
    }
    file.find_floats("hobbit.low_costs", low_costs);
    file.find_floats("hobbit.skip_costs", skip_costs);
    settings = find_settings(file, setting_keys);
    return {};
}

stored_settings find_settings(const gguf_file & file, const std::vector<std::string> & keys) {
    stored_settings found;
    double          value = 0;
    std::string     text;
    for (const std::string & key : keys) {
        if (file.find_number(key, value)) {
            found.emplace_back(key, value);
        } else if (file.find_string(key, text)) {
            found.emplace_back(key, text);
        }
    }
    return found;
}

expert_table<float> use_rates(const expert_index & index) {
    const std::vector<int32_t> & counts = index.calibration().uses;
    if (std::all_of(counts.begin(), counts.end(), [](int32_t n) { return n == 0; })) {
        return {};
    }
    const uint32_t      n_experts = index.n_experts();
    expert_table<float> rates(index.n_layers(), n_experts);
    for (layer_id layer = 0; layer < index.n_layers(); layer++) {
        const auto    first  = counts.begin() + ptrdiff_t(size_t(layer) * n_experts);
        const int64_t sum    = std::accumulate(first, first + n_experts, int64_t(0));
        const auto    n_used = float(std::max(1u, index.layer(layer).n_used));
        for (uint32_t e = 0; e < n_experts && sum > 0; e++) {
            rates[{ layer, e }] = float(first[e]) * n_used / float(sum);
        }
    }
    return rates;
}

std::vector<expert_id> most_used(const expert_table<float> & rates) {
    std::vector<expert_id> used;
    for (size_t i = 0; i < rates.size(); i++) {
        if (rates[rates.id(i)] > 0) {
            used.push_back(rates.id(i));
        }
    }
    std::stable_sort(used.begin(), used.end(), [&](expert_id a, expert_id b) { return rates[a] > rates[b]; });
    return used;
}

} // namespace hobbit
