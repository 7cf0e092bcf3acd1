// SPDX-License-Identifier: MIT
#include "server-hobbit.h"

#include "server-common.h"
#include "server-http.h"

#include "llama-expert-cache.h"

#include <algorithm>
#include <mutex>
#include <vector>

//
// requests
//

server_hobbit_thresholds server_hobbit_parse(const json & data) {
    if (!data.is_object()) {
        throw std::invalid_argument("must be an object like {\"t1\": 0.6, \"t2\": 0.9}");
    }
    server_hobbit_thresholds thresholds;
    for (const auto & item : data.items()) {
        double * value = item.key() == "t1" ? &thresholds.t1 : item.key() == "t2" ? &thresholds.t2 : nullptr;
        if (!value) {
            throw std::invalid_argument(string_format("has no '%s', only t1 and t2", item.key().c_str()));
        }
        if (item.value().is_null()) {
            continue;
        }
        if (!item.value().is_number()) {
            throw std::invalid_argument(string_format("%s must be a number", item.key().c_str()));
        }
        *value = item.value().get<double>();
        if (!(*value >= 0.0 && *value <= 1.0)) {
            throw std::invalid_argument(string_format("%s must lie between 0 and 1", item.key().c_str()));
        }
    }
    if (thresholds.t1 > thresholds.t2) {
        throw std::invalid_argument("t1 must not be above t2: between them lies low precision");
    }
    return thresholds;
}

server_hobbit_thresholds server_hobbit_effective(const llama_context * ctx, server_hobbit_thresholds thresholds) {
    const hobbit_model * model = llama_model_expert_cache(llama_get_model(ctx));
    if (!model) {
        return thresholds;
    }
    hobbit_info info;
    hobbit_get_info(model, &info);
    if (!thresholds.given()) {
        return { info.t1, info.t2 };
    }
    if (std::isnan(thresholds.t1)) {
        thresholds.t1 = std::min(info.t1, thresholds.t2);
    }
    if (std::isnan(thresholds.t2)) {
        thresholds.t2 = std::max(info.t2, thresholds.t1);
    }
    return thresholds;
}

std::string server_hobbit_begin(llama_context * ctx, llama_seq_id seq_id, server_hobbit_thresholds effective,
                                bool given) {
    hobbit_model * model = llama_model_expert_cache(llama_get_model(ctx));
    if (!model) {
        return given ? "Field 'hobbit': this model runs without an expert cache, so it has no thresholds" : "";
    }
    hobbit_begin_sequence(model, seq_id);
    char err[1024];
    if (given && !hobbit_set_sequence_thresholds(model, seq_id, effective.t1, effective.t2, err, sizeof(err))) {
        return std::string("Field 'hobbit': ") + err;
    }
    return "";
}

//
// counters
//

// The cache of the model that the server has loaded, and its last known counters. Guarded by the mutex.
static struct {
    std::mutex     mutex;
    hobbit_model * model  = nullptr; // holds a reference
    bool           cached = false;
    hobbit_info    info   = {};
    hobbit_stats   stats  = {};
} g_cache;

static std::mutex  g_failure_mutex;
static std::string g_failure; // guarded by g_failure_mutex

void server_hobbit_use(const llama_context * ctx) {
    hobbit_model * model = ctx ? llama_model_expert_cache(llama_get_model(ctx)) : nullptr;
    if (model) {
        hobbit_ref(model);
    }
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    if (g_cache.model) {
        hobbit_get_info(g_cache.model, &g_cache.info);
        hobbit_get_stats(g_cache.model, &g_cache.stats);
        hobbit_unref(g_cache.model);
    }
    g_cache.model = model;
    if (ctx) {
        g_cache.cached = model;
    }
}

// One value; those of one metric follow each other.
struct hobbit_value {
    const char * key; // in JSON
    const char * metric;
    const char * label; // of the metric, or ""
    const char * help;  // of the metric
    json         value;
};

// clang-format off
static std::vector<hobbit_value> hobbit_counters(const hobbit_stats & s) {
    return {
        { "selections_high",    "selections_total", "precision=\"high\"",    "Experts chosen by a router for a token, by the precision that served them", s.selections_high },
        { "selections_low",     "selections_total", "precision=\"low\"",     "", s.selections_low },
        { "selections_skipped", "selections_total", "precision=\"skipped\"", "", s.selections_skipped },
        { "hits_high",          "hits_total",       "precision=\"high\"",    "Experts needed by a layer for a batch that were there", s.hits_high },
        { "hits_low",           "hits_total",       "precision=\"low\"",     "", s.hits_low },
        { "misses_high",        "misses_total",     "precision=\"high\"",    "Experts needed by a layer for a batch that were not", s.misses_high },
        { "misses_low",         "misses_total",     "precision=\"low\"",     "", s.misses_low },
        { "host_hits_high",     "host_hits_total",  "precision=\"high\"",    "Of the misses of a device's pools, experts that were in host memory", s.host_hits_high },
        { "host_hits_low",      "host_hits_total",  "precision=\"low\"",     "", s.host_hits_low },
        { "evictions",          "evictions_total",           "", "Experts that made room for others", s.evictions },
        { "bytes_read",         "read_bytes_total",          "", "Bytes of experts read from disk", s.bytes_read },
        { "bytes_transferred",  "transferred_bytes_total",   "", "Bytes of experts that went to a device with memory of its own", s.bytes_transferred },
        { "layers_computed",    "layers_computed_total",     "", "Layers with routed experts that were computed", s.layers_computed },
        { "waves",              "waves_total",               "", "Parts in which they were computed; more than layers where one needed more experts than fit", s.waves },
        { "predicted",          "predicted_experts_total",   "", "Experts that the predictor named for a layer ahead", s.predicted },
        { "predicted_right",    "predicted_right_total",     "", "Of those, chosen when the layer ran", s.predicted_right },
        { "prefetched",         "prefetched_experts_total",  "", "Experts asked for ahead of their layer", s.prefetched },
        { "prefetched_used",    "prefetched_used_total",     "", "Of those, chosen when the layer ran", s.prefetched_used },
        { "bytes_prefetched",   "prefetched_bytes_total",    "", "Bytes read ahead, part of hobbit_read_bytes_total", s.bytes_prefetched },
        { "prefetch_pauses",    "prefetch_pauses_total",     "", "Times that prefetch did not pay and was switched off for a while", s.prefetch_pauses },
        { "stall_s",            "stall_seconds_total",       "", "Time that computing waited for the disk", s.stall_s },
        { "disk_demand_s",      "disk_demand_seconds_total", "", "Time with a read under way that computing needs", s.disk_demand_s },
        { "compute_s",          "compute_seconds_total",     "", "Time in layers with routed experts, waiting included", s.compute_s },
        { "transfer_s",         "transfer_seconds_total",    "", "Time with experts on their way to a device with memory of its own", s.transfer_s },
        { "selections_cpu",     "cpu_selections_total",      "", "Of the selections, computed by the CPU beside such a device", s.selections_cpu },
        { "selections_split",   "split_selections_total",    "", "Of those, all but the last product, which is the device's", s.selections_split },
        { "cpu_s",              "cpu_seconds_total",         "", "Time that this took, with copying rows there and back", s.cpu_s },
        { "layers_predicted",   "predicted_layers_total",    "", "Layers beside such a device that were timed, reading nothing from disk", s.layers_predicted },
        { "predicted_s",        "predicted_seconds_total",   "", "Time of these as the cost model said it before", s.predicted_s },
        { "measured_s",         "measured_seconds_total",    "", "Time that they took", s.measured_s },
    };
}

static std::vector<hobbit_value> hobbit_gauges(const hobbit_info & i, const hobbit_stats & s) {
    return {
        { "n_layers",        "layers",             "", "Layers with routed experts", i.n_layers },
        { "n_experts",       "experts",            "", "Experts of such a layer", i.n_experts },
        { "n_experts_used",  "experts_used",       "", "Of those, used for a token", i.n_experts_used },
        { "n_tiers",         "tiers",              "", "Precisions in the model's files", i.n_tiers },
        { "tier_bytes_high", "tier_bytes",         "precision=\"high\"", "Size of all routed experts on disk", i.tier_bytes_high },
        { "tier_bytes_low",  "tier_bytes",         "precision=\"low\"",  "", i.tier_bytes_low },
        { "pool_bytes_high", "pool_bytes",         "precision=\"high\"", "Size of the expert cache", i.pool_bytes_high },
        { "pool_bytes_low",  "pool_bytes",         "precision=\"low\"",  "", i.pool_bytes_low },
        { "pool_slots_high", "pool_slots",         "precision=\"high\"", "Experts that fit into the cache", i.pool_slots_high },
        { "pool_slots_low",  "pool_slots",         "precision=\"low\"",  "", i.pool_slots_low },
        { "host_bytes_high", "host_bytes",         "precision=\"high\"", "Size of the expert cache in host memory, behind a device's", i.host_bytes_high },
        { "host_bytes_low",  "host_bytes",         "precision=\"low\"",  "", i.host_bytes_low },
        { "host_slots_high", "host_slots",         "precision=\"high\"", "Experts that fit into it", i.host_slots_high },
        { "host_slots_low",  "host_slots",         "precision=\"low\"",  "", i.host_slots_low },
        { "t1",              "threshold",          "name=\"t1\"", "Thresholds of requests that bring none", i.t1 },
        { "t2",              "threshold",          "name=\"t2\"", "", i.t2 },
        { "prefetch_active", "prefetch_active",    "", "1 while experts are prefetched", s.prefetch_active },
    };
}
// clang-format on

// Calls use(info, stats) with the counters as they are now, or as they were when the model was last unloaded. False
// without an expert cache.
template <typename Use>
static bool with_counters(Use use) {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    if (g_cache.model) {
        hobbit_get_info(g_cache.model, &g_cache.info);
        hobbit_get_stats(g_cache.model, &g_cache.stats);
    }
    if (g_cache.cached) {
        use(g_cache.info, g_cache.stats);
    }
    return g_cache.cached;
}

std::unique_ptr<server_http_res> server_hobbit_get(const server_http_req &) {
    json data      = json::object();
    data["cached"] = with_counters([&](const hobbit_info & info, const hobbit_stats & stats) {
        data["direct_io"] = info.direct_io;
        for (const auto & values : { hobbit_gauges(info, stats), hobbit_counters(stats) }) {
            for (const hobbit_value & v : values) {
                data[v.key] = v.value;
            }
        }
    });
    auto res       = std::make_unique<server_http_res>();
    res->data      = safe_json_to_str(data);
    return res;
}

static std::string hobbit_metrics(const char * type, const std::vector<hobbit_value> & values) {
    std::string text;
    for (const hobbit_value & v : values) {
        const std::string name = std::string("hobbit_") + v.metric;
        if (v.help[0]) {
            text += "# HELP " + name + " " + v.help + "\n# TYPE " + name + " " + type + "\n";
        }
        text += name + (v.label[0] ? std::string("{") + v.label + "}" : "") + " " + v.value.dump() + "\n";
    }
    return text;
}

std::string server_hobbit_metrics() {
    std::string text;
    with_counters([&](const hobbit_info & info, const hobbit_stats & stats) {
        text = hobbit_metrics("counter", hobbit_counters(stats)) + hobbit_metrics("gauge", hobbit_gauges(info, stats));
    });
    return text;
}

//
// failure
//

std::string server_hobbit_check(const llama_context * ctx) {
    char                 err[1024];
    const hobbit_model * model   = llama_model_expert_cache(llama_get_model(ctx));
    const std::string    failure = model && !hobbit_check(model, err, sizeof(err)) ? err : "";

    std::lock_guard<std::mutex> lock(g_failure_mutex);
    g_failure = failure;
    return failure;
}

std::string server_hobbit_failure() {
    std::lock_guard<std::mutex> lock(g_failure_mutex);
    return g_failure;
}
