// SPDX-License-Identifier: MIT
#include "model/calibration.h"

#include "model/expert-index.h"
#include "model/sidecar.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

namespace hobbit {

static bool are_below(const int32_t * first, size_t n, uint32_t end) {
    return std::all_of(first, first + n, [&](int32_t each) { return each >= 0 && uint32_t(each) < end; });
}

static bool is_valid(const stored_path & p, const std::vector<uint32_t> & n_experts) {
    const bool is_pair = p.n_now == 1 || (p.n_now == 0 && p.n_before == 0);
    if ((p.n_before == 0 && !is_pair) || (p.n_before > 0 && p.n_now == 0) || p.n_tokens == 0) {
        return false;
    }
    const uint32_t depth = (p.n_now > 0) + (p.n_before > 0);
    return p.layer >= depth && p.layer < n_experts.size() &&
           (p.n_now == 0 || are_below(p.now, p.n_now, n_experts[p.layer - 1])) &&
           (p.n_before == 0 || are_below(p.before, p.n_before, n_experts[p.layer - 2])) &&
           std::all_of(
               p.next, p.next + p.n_next,
               [&](int32_t each) {
                   return each >= 0 && uint32_t(each >> 8) < n_experts[p.layer] && (each & 255) <= p.n_tokens;
               });
}

bool each_path(const std::vector<int32_t> & values, const std::vector<uint32_t> & n_experts, const path_visit & visit) {
    constexpr size_t n_head = 5;
    size_t           at     = 0;
    while (values.size() - at >= n_head) {
        const int32_t * head = &values[at];
        if (!are_below(head, n_head, 1u << 16) || head[1] > UINT8_MAX) {
            return false;
        }
        at                 += n_head;
        const size_t n_now = size_t(head[2]), n_before = size_t(head[3]), n_next = size_t(head[4]);
        if (n_now + n_before + n_next > values.size() - at) {
            return false;
        }
        const int32_t *   first = head + n_head;
        const stored_path path  = { uint32_t(head[0]), uint8_t(head[1]),         first, n_now, first + n_now,
                                    n_before,          first + n_now + n_before, n_next };
        if (!is_valid(path, n_experts)) {
            return false;
        }
        visit(path);
        at += n_now + n_before + n_next;
    }
    return at == values.size();
}

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
        return s.reason() == HOBBIT_HEADER_NOT_READ ? s : damaged(": " + s.message());
    }
    if (!file.has("hobbit.model_bytes")) {
        return damaged("");
    }
    HOBBIT_TRY(check_sizes(file, model_path, index));
    if (file.find_array("hobbit.expert_uses", uses) &&
        (uses.size() != index.n_layers() * index.n_experts() ||
         std::any_of(uses.begin(), uses.end(), [](int32_t n) { return n < 0; }))) {
        return damaged(": it does not count the uses of this model's experts");
    }
    if (file.find_array("hobbit.paths", paths) &&
        !each_path(paths, index.experts_by_layer(), [](const stored_path &) {})) {
        return damaged(": its activation paths are not of this model's experts");
    }
    if (file.find_array("hobbit.low_costs", low_costs)) {
        file.find_string(file.has("hobbit.costs_rule") ? "hobbit.costs_rule" : "hobbit.rule", costs_rule);
    }
    file.find_array("hobbit.skip_costs", skip_costs);
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
