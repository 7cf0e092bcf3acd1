// SPDX-License-Identifier: MIT
#include "model/calibration.h"

#include "model/expert-index.h"
#include "model/sidecar.h"
#include "model/stored-paths.h"

#include <algorithm>
#include <filesystem>

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

} // namespace hobbit
