// SPDX-License-Identifier: MIT
#include "server-hobbit.h"

#include "server-common.h"
#include "server-http.h"

#include "llama-expert-cache.h"

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <regex>
#include <set>
#include <stdexcept>
#include <vector>

// The cache of the model that the server has loaded, and its last known counters. Guarded by the mutex.
static struct {
    std::mutex     mutex;
    hobbit_model * model  = nullptr; // holds a reference
    bool           cached = false;
    hobbit_info    info   = {};

    uint64_t checkpoint_bytes = UINT64_MAX;

    std::vector<hobbit_resolved_setting> settings; // in the order of hobbit_setting_spec_at

    std::vector<double> counters; // in the order of hobbit_counter_at

    std::vector<uint64_t> layer_hits, layer_misses; // [layer]

    std::string failure; // why the cache computes nothing any more; "": it does
} g_cache;

static bool server_hobbit_is_cached() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.cached;
}

//
// requests
//

static const std::vector<const hobbit_setting_spec *> & live_settings() {
    static const auto all = [] {
        std::vector<const hobbit_setting_spec *> found;
        for (size_t i = 0; const hobbit_setting_spec * spec = hobbit_setting_spec_at(i); i++) {
            if (spec->is_live) {
                found.push_back(spec);
            }
        }
        return found;
    }();
    return all;
}

static std::string live_names() {
    std::string names;
    for (const hobbit_setting_spec * spec : live_settings()) {
        names += std::string(spec->option) + ", ";
    }
    return names + "alone";
}

// The word as a setting takes it, which does not own its text.
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

const char * server_hobbit_help() {
    static const std::string text =
        "Settings of the expert cache for this request: an object with some of " + live_names();
    return text.c_str();
}

std::vector<hobbit_setting> server_hobbit_parse(const json & data, bool & alone) {
    if (!data.is_object()) {
        throw std::invalid_argument(
            "must be an object like {\"quality\": \"fast\"}, {\"t1\": 0.6, \"t2\": 0.9} or {\"price\": 0.01}");
    }
    std::vector<hobbit_setting> changes;
    for (const auto & item : data.items()) {
        if (item.key() == "alone") {
            if (!item.value().is_boolean()) {
                throw std::invalid_argument("alone must be true or false");
            }
            alone = item.value().get<bool>();
            continue;
        }
        const auto & live = live_settings();
        const auto   spec = std::find_if(live.begin(), live.end(), [&](auto * s) { return item.key() == s->option; });
        if (spec == live.end()) {
            throw std::invalid_argument(
                string_format("has no '%s', only %s", item.key().c_str(), live_names().c_str()));
        }
        const bool is_word = (*spec)->choices;
        if (is_word && item.value().is_string()) {
            changes.push_back({ (*spec)->key, 0.0, known_word(**spec, item.value().get<std::string>()) });
        } else if (!is_word && item.value().is_number()) {
            changes.push_back({ (*spec)->key, item.value().get<double>(), nullptr });
        } else if (!item.value().is_null()) {
            const std::string what = is_word ? std::string("one of ") + (*spec)->choices : "a number";
            throw std::invalid_argument(string_format("%s must be %s", item.key().c_str(), what.c_str()));
        }
    }
    return changes;
}

void server_hobbit_check_triggers(const json & triggers) {
    static constexpr size_t MAX_SIZE = 8192;
    for (const json & trigger : triggers) {
        const int type = trigger.at("type").get<int>();
        if (type < COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN || type > COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
            throw std::invalid_argument(string_format("there is no trigger of type %d", type));
        }
        if (trigger.at("value").get<std::string>().size() > MAX_SIZE) {
            throw std::invalid_argument(string_format("a trigger may have %zu bytes", MAX_SIZE));
        }
    }
}

static size_t longest_token(const llama_vocab * vocab) {
    size_t longest = 1;
    for (llama_token token = 0; token < llama_vocab_n_tokens(vocab); token++) {
        longest = std::max(longest, std::strlen(llama_vocab_get_text(vocab, token)));
    }
    return longest;
}

void server_hobbit_check_prompt(const llama_vocab * vocab, const json & prompt, int32_t n_ctx) {
    if (prompt.is_array()) {
        server_requests_check_prompts(prompt.empty() || prompt.at(0).is_number() ? 1 : prompt.size());
        for (const json & each : prompt) {
            if (!each.is_number()) {
                server_hobbit_check_prompt(vocab, each, n_ctx);
            }
        }
        return;
    }
    const size_t size = prompt.is_string() ? prompt.get<std::string>().size() : 0;
    if (size > size_t(n_ctx) && server_hobbit_is_cached() && size > size_t(n_ctx) * longest_token(vocab)) {
        throw std::invalid_argument(
            string_format("the prompt has %zu bytes, more than the context of %d tokens can hold; shorten it", size,
                          n_ctx));
    }
}

std::string server_hobbit_begin(llama_context * ctx, llama_seq_id seq_id, const std::vector<hobbit_setting> & changes) {
    hobbit_context * context = llama_expert_cache_context(ctx);
    if (!context) {
        return changes.empty() ? ""
                               : "Field 'hobbit': this model runs without an expert cache, so it has no thresholds";
    }
    hobbit_begin_sequence(context, seq_id);
    char       err[1024];
    const bool ok = changes.empty() ||
                    hobbit_change_sequence_settings(context, seq_id, changes.data(), changes.size(), err, sizeof(err));
    return ok ? "" : std::string("Field 'hobbit': ") + err;
}

hobbit_precision server_hobbit_precision(const llama_context * ctx, llama_seq_id seq_id) {
    const hobbit_context * context = llama_expert_cache_context(ctx);
    return context ? hobbit_sequence_precision(context, seq_id) : SERVER_HOBBIT_NO_TOKENS;
}

//
// checkpoints
//

int64_t server_hobbit_default(std::vector<llama_model_kv_override> & kvs, const std::string & key, int64_t value) {
    const auto given = std::find_if(kvs.begin(), kvs.end(), [&](const auto & kv) { return kv.key == key; });
    if (given != kvs.end()) {
        return given->val_i64;
    }
    llama_model_kv_override kv = {};
    kv.tag                     = LLAMA_KV_OVERRIDE_TYPE_INT;
    kv.val_i64                 = value;
    key.copy(kv.key, sizeof(kv.key) - 1);
    kvs.resize(std::max<size_t>(kvs.size(), 1)); // the end
    kvs.insert(kvs.begin(), kv);
    return value;
}

void server_hobbit_plan_checkpoints(common_params & params) {
    const auto & types = params.speculative.types;
    const bool   drafts =
        std::any_of(types.begin(), types.end(), [](auto t) { return t != COMMON_SPECULATIVE_TYPE_NONE; });
    const int64_t n_drafts = drafts ? params.n_parallel : 0; // a slot keeps the state before its draft
    const int64_t n        = int64_t(params.n_parallel) * std::max(params.n_ctx_checkpoints, 0) + n_drafts;

    server_requests_plan(params);
    server_hobbit_default(params.kv_overrides, "hobbit.snapshots", n);
    server_hobbit_default(params.kv_overrides, "hobbit.least_snapshots", n_drafts);
}

//
// counters
//

// The counters as they are now, or as they were when the model was last unloaded; empty without an expert cache. Reads
// the counters of layers as well. REQUIRES: the mutex is held
static const std::vector<double> & read_counters() {
    if (!g_cache.model) {
        return g_cache.counters;
    }
    size_t n = 0;
    while (hobbit_counter_at(n)) {
        n++;
    }
    g_cache.counters.resize(n);
    hobbit_get_counters(g_cache.model, g_cache.counters.data(), n);
    g_cache.layer_hits.resize(g_cache.info.n_layers);
    g_cache.layer_misses.resize(g_cache.info.n_layers);
    hobbit_get_layer_uses(g_cache.model, g_cache.layer_hits.data(), g_cache.layer_misses.data(), g_cache.info.n_layers);
    return g_cache.counters;
}

uint64_t server_hobbit_checkpoint_bytes() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.checkpoint_bytes;
}

std::vector<hobbit_setting> server_hobbit_of_name(const json & name) {
    if (!name.is_string() || !string_ends_with(name.get<std::string>(), "-exact") || !server_hobbit_is_cached()) {
        return {}; // without a cache exact in any case
    }
    return { { "hobbit.quality", 0.0, "lossless" } };
}

void server_hobbit_use(const llama_context * ctx) {
    hobbit_model * model = ctx ? llama_model_expert_cache(llama_get_model(ctx)) : nullptr;
    hobbit_info    info  = {};

    std::vector<hobbit_resolved_setting> settings;
    if (model) { // both stay, and later they would wait for a computation
        hobbit_ref(model);
        hobbit_get_info(model, &info);
        while (hobbit_setting_spec_at(settings.size())) {
            settings.emplace_back();
        }
        hobbit_get_settings(model, settings.data(), settings.size());
    }
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    read_counters();
    hobbit_unref(g_cache.model);
    g_cache.model = model;
    if (ctx) {
        g_cache.cached   = model;
        g_cache.info     = info;
        g_cache.settings = std::move(settings);

        g_cache.checkpoint_bytes = model ? info.snapshot_bytes : UINT64_MAX;
        server_requests_bound(model);
    }
}

// One value; those of one metric are neighbours.
struct hobbit_value {
    const char * key;    // in JSON
    const char * metric; // null: none
    const char * label;  // label of the metric, or null
    const char * help;   // help of the metric
    json         value;
    const char * type = "gauge";
};

// clang-format off
static std::vector<hobbit_value> hobbit_values(const hobbit_info & i, const std::vector<double> & counters) {
    const char * const high = "precision=\"high\"";
    const char * const low  = "precision=\"low\"";

    std::vector<hobbit_value> values = {
        { "n_layers",        "layers",       nullptr,       "Layers with routed experts",                    i.n_layers },
        { "n_experts",       "experts",      nullptr,       "Experts per layer",                             i.n_experts },
        { "n_experts_used",  "experts_used", nullptr,       "Experts per layer used for a token",            i.n_experts_used },
        { "n_tiers",         "tiers",        nullptr,       "Precisions in the model's files",               i.n_tiers },
        { "tier_bytes_high", "tier_bytes",   high,          "Size of all routed experts on disk",            i.tier_bytes_high },
        { "tier_bytes_low",  "tier_bytes",   low,           "",                                              i.tier_bytes_low },
        { "pool_bytes_high", "pool_bytes",   high,          "Size of the expert cache",                      i.pool_bytes_high },
        { "pool_bytes_low",  "pool_bytes",   low,           "",                                              i.pool_bytes_low },
        { "pool_slots_high", "pool_slots",   high,          "Experts that fit in the cache",                 i.pool_slots_high },
        { "pool_slots_low",  "pool_slots",   low,           "",                                              i.pool_slots_low },
        { "host_bytes_high", "host_bytes",   high,          "Size of the expert cache in host memory, behind the cache of a GPU", i.host_bytes_high },
        { "host_bytes_low",  "host_bytes",   low,           "",                                              i.host_bytes_low },
        { "host_slots_high", "host_slots",   high,          "Experts that fit in the cache in host memory",  i.host_slots_high },
        { "host_slots_low",  "host_slots",   low,           "",                                              i.host_slots_low },
        { "snapshot_bytes",  "snapshot_bytes", nullptr,  "Memory for context checkpoints of all slots",   i.snapshot_bytes },
        { "direct_io",       nullptr,        nullptr,       "",                                              i.direct_io },
        { "t1",              "threshold",    "name=\"t1\"", "Thresholds of requests without their own",      i.t1 },
        { "t2",              "threshold",    "name=\"t2\"", "",                                              i.t2 },
    };
    for (size_t n = 0; n < g_cache.settings.size(); n++) {
        const hobbit_setting_spec * spec = hobbit_setting_spec_at(n);
        if (spec->is_live && values.end() == std::find_if(values.begin(), values.end(), [&](auto & v) { return std::string(v.key) == spec->option; })) {
            const hobbit_resolved_setting & own = g_cache.settings[n];
            if (spec->choices) { // a metric is a number
                values.push_back({ spec->option, nullptr, nullptr, "", own.text });
            } else {
                values.push_back({ spec->option, spec->option, nullptr, spec->help, own.number });
            }
        }
    }
    for (size_t n = 0; n < counters.size(); n++) {
        const hobbit_counter * c       = hobbit_counter_at(n);
        const bool             seconds = c->kind == HOBBIT_SECONDS;
        values.push_back({ c->name, c->metric, c->label, c->help, seconds ? json(counters[n]) : json(uint64_t(counters[n])),
                           c->kind == HOBBIT_STATE ? "gauge" : "counter" });
    }
    return values;
}
// clang-format on

// The values as they are now, or as they were when the model was last unloaded; none without an expert cache.
// REQUIRES: the mutex is held
static std::vector<hobbit_value> current_values() {
    return g_cache.cached ? hobbit_values(g_cache.info, read_counters()) : std::vector<hobbit_value>();
}

std::unique_ptr<server_http_res> server_hobbit_get(const server_http_req &) {
    json data = json::object();
    {
        std::lock_guard<std::mutex> lock(g_cache.mutex); // once: what is told is of one moment
        const auto                  values = current_values();
        data["cached"]                     = !values.empty();
        for (const hobbit_value & v : values) {
            data[v.key] = v.value;
        }
        if (!values.empty()) {
            data["hits_by_layer"]   = g_cache.layer_hits;
            data["misses_by_layer"] = g_cache.layer_misses;
        }
    }
    if (data.size() > 1) {
        data["reading"] = server_passes_progress();
    }

    auto res  = std::make_unique<server_http_res>();
    res->data = safe_json_to_str(data);
    return res;
}

// The counters by name; none without an expert cache. REQUIRES: the mutex is held
static std::map<std::string, double> counters_by_name() {
    const std::vector<double> &   counters = read_counters();
    std::map<std::string, double> all;
    for (size_t i = 0; i < counters.size(); i++) {
        all[hobbit_counter_at(i)->name] = counters[i];
    }
    return all;
}

std::pair<double, int32_t> server_hobbit_layers() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return { counters_by_name()["layers_computed"], g_cache.cached ? int32_t(g_cache.info.n_layers) : 0 };
}

std::pair<double, double> server_hobbit_uses() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    auto                        counters = counters_by_name();
    const double                hits     = counters["hits_high"] + counters["hits_low"];
    return { hits, hits + counters["misses_high"] + counters["misses_low"] };
}

std::string server_hobbit_metrics() {
    std::string               text, previous;
    std::vector<hobbit_value> values;
    {
        std::lock_guard<std::mutex> lock(g_cache.mutex);
        values = current_values();
    }
    for (const hobbit_value & v : values) {
        if (!v.metric) {
            continue;
        }
        const std::string name = std::string("hobbit_") + v.metric;
        if (name != previous) {
            text += "# HELP " + name + " " + v.help + "\n# TYPE " + name + " " + v.type + "\n";
        }
        text     += name + (v.label ? std::string("{") + v.label + "}" : "") + " " + v.value.dump() + "\n";
        previous  = name;
    }
    return text;
}

//
// failure
//

// A disk that answers takes milliseconds.
static constexpr double LONG_READ_S = 3.0;

// "" unless a read takes that long.
static std::string waiting_for_disk() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    const double                seconds = g_cache.model ? hobbit_oldest_read(g_cache.model) : 0.0;
    return seconds < LONG_READ_S ? "" : string_format("the disk has not answered a read for %.0f s", seconds);
}

server_requests_handler server_hobbit_while_waiting(server_requests_handler get) {
    return [get = std::move(get)](const server_http_req & req) {
        if (waiting_for_disk().empty()) {
            return get(req);
        }
        auto res          = std::make_unique<server_http_res>();
        res->content_type = "text/plain; version=0.0.4";
        res->data         = server_hobbit_metrics();
        return res;
    };
}

// '/folder/model.gguf' becomes 'model.gguf'.
static std::string without_folders(const std::string & text) {
    return std::regex_replace(text, std::regex("'/([^']*/)?"), "'");
}

std::string server_hobbit_check(const llama_context * ctx) {
    char                 err[1024];
    const hobbit_model * model   = llama_model_expert_cache(llama_get_model(ctx));
    const std::string    failure = model && !hobbit_check(model, err, sizeof(err)) ? err : "";

    std::lock_guard<std::mutex> lock(g_cache.mutex);
    g_cache.failure = failure;
    return failure;
}

std::string server_hobbit_failure() {
    {
        std::lock_guard<std::mutex> lock(g_cache.mutex);
        if (!g_cache.failure.empty()) {
            return without_folders(g_cache.failure);
        }
    }
    return waiting_for_disk();
}

void server_hobbit_say_busy(bool is_busy) {
    static const char *      number = std::getenv("HOBBIT_BUSY_SOCKET");
    static std::atomic<bool> said{ true };
    if (number && said.exchange(is_busy) != is_busy) {
        send(std::atoi(number), is_busy ? "1" : "0", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}
