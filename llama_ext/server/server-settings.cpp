// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-schema.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>

// Settings of the expert cache that a request brings. It begins a sequence of the cache with them, and computes tokens
// anew that a slot has in lower precision.

static std::vector<const hobbit_setting_spec *> live_settings() {
    std::vector<const hobbit_setting_spec *> found;
    for (size_t i = 0; const hobbit_setting_spec * spec = hobbit_setting_spec_at(i); i++) {
        if (spec->is_live) {
            found.push_back(spec);
        }
    }
    return found;
}

static std::string live_names() {
    std::string names;
    for (const hobbit_setting_spec * spec : live_settings()) {
        names += std::string(spec->option) + ", ";
    }
    return names + "alone";
}

// The word as a setting's value, which does not own its text.
static const char * known_word(const hobbit_setting_spec & spec, const std::string & word) {
    static std::mutex            mutex;
    static std::set<std::string> words; // guarded by the mutex

    const auto known = string_split<std::string>(spec.choices, ' ');
    if (std::find(known.begin(), known.end(), word) == known.end()) {
        throw std::invalid_argument(
            string_format("%s is '%s', and must be one of %s", spec.option, word.c_str(), spec.choices));
    }
    std::lock_guard<std::mutex> lock(mutex);
    return words.insert(word).first->c_str();
}

// Reads live settings like {"t1": 0.6, "t2": 0.9}, and alone. Throws std::invalid_argument.
static server_task_hobbit parse_settings(const json & data) {
    if (!data.is_object()) {
        throw std::invalid_argument(
            "must be an object like {\"quality\": \"fast\"}, {\"t1\": 0.6, \"t2\": 0.9} or {\"price\": 0.01}");
    }
    const auto         live = live_settings();
    server_task_hobbit asked;
    for (const auto & item : data.items()) {
        if (item.key() == "alone") {
            if (!item.value().is_boolean()) {
                throw std::invalid_argument("alone must be true or false");
            }
            asked.alone = item.value().get<bool>();
            continue;
        }
        const auto spec = std::find_if(live.begin(), live.end(), [&](auto * s) { return item.key() == s->option; });
        if (spec == live.end()) {
            throw std::invalid_argument(
                string_format("has no '%s', only %s", item.key().c_str(), live_names().c_str()));
        }
        const bool is_word = (*spec)->choices;
        if (is_word && item.value().is_string()) {
            asked.settings.push_back({ (*spec)->key, 0.0, known_word(**spec, item.value().get<std::string>()) });
        } else if (!is_word && item.value().is_number()) {
            asked.settings.push_back({ (*spec)->key, item.value().get<double>(), nullptr });
        } else if (!item.value().is_null()) {
            const std::string what = is_word ? std::string("one of ") + (*spec)->choices : "a number";
            throw std::invalid_argument(string_format("%s must be %s", item.key().c_str(), what.c_str()));
        }
    }
    return asked;
}

hobbit_precision server_precision(const llama_context * ctx, llama_seq_id seq_id) {
    const hobbit_context * context = llama_expert_cache_context(ctx);
    return context ? hobbit_sequence_precision(context, seq_id) : SERVER_NO_TOKENS;
}

namespace {

class settings_hooks : public server_hooks {
  public:
    void fields(std::vector<std::unique_ptr<server_schema::field>> & all) override {
        using namespace server_schema;

        all.emplace_back((new field_json("model"))
                             ->set_desc("The model's name. One that ends with -exact asks for high precision alone")
                             ->set_handler([](field_eval_context & ctx, const json & data) {
                                 const json & name = data.at("model");
                                 if (name.is_string() && string_ends_with(name.get<std::string>(), "-exact") &&
                                     server_report_is_cached()) { // without a cache every answer is exact
                                     ctx.params.hobbit.settings = { { "hobbit.quality", 0.0, "lossless" } };
                                 }
                             }));
        all.emplace_back((new field_json("hobbit"))
                             ->set_desc("Settings of the expert cache for this request: an object of live ones")
                             ->set_handler([](field_eval_context & ctx, const json & data) {
                                 ctx.params.hobbit = parse_settings(data.at("hobbit"));
                             }));
    }
};

} // namespace

std::string server_begin_settings(const llama_context * ctx, int32_t id_slot, const server_task_hobbit & asked,
                                  bool shares_cells) {
    hobbit_context * context = llama_expert_cache_context(ctx);
    const auto &     changes = asked.settings;
    char             err[1024];
    if (context) {
        hobbit_begin_sequence(context, id_slot);
    }
    if (!context && !changes.empty()) {
        return "Field 'hobbit': this model runs without an expert cache, so it has no thresholds";
    }
    if (!changes.empty() &&
        !hobbit_change_sequence_settings(context, id_slot, changes.data(), changes.size(), err, sizeof(err))) {
        return std::string("Field 'hobbit': ") + err;
    }
    return asked.alone && shares_cells ? "Field 'hobbit': alone needs a context of its own for each slot: start the "
                                         "server with --no-kv-unified"
                                       : "";
}

server_hooks & server_hooks_settings = server_hooks_of<settings_hooks>();
