// SPDX-License-Identifier: MIT
#include "server-hobbit.h"

#include "server-common.h"
#include "server-http.h"

#include "llama-expert-cache.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <list>
#include <malloc.h>
#include <mutex>
#include <stdexcept>
#include <vector>

static bool server_hobbit_is_cached();

//
// requests
//

server_hobbit_thresholds server_hobbit_parse(const json & data) {
    if (!data.is_object()) {
        throw std::invalid_argument("must be an object like {\"t1\": 0.6, \"t2\": 0.9} or {\"price\": 0.01}");
    }
    server_hobbit_thresholds thresholds;
    for (const auto & item : data.items()) {
        const bool is_price = item.key() == "price";
        double *   value    = item.key() == "t1"           ? &thresholds.t1
                              : item.key() == "t2"         ? &thresholds.t2
                              : item.key() == "confidence" ? &thresholds.confidence
                              : is_price                   ? &thresholds.price
                                                           : nullptr;
        if (!value) {
            throw std::invalid_argument(
                string_format("has no '%s', only t1, t2, price and confidence", item.key().c_str()));
        }
        if (item.value().is_null()) {
            continue;
        }
        if (!item.value().is_number()) {
            throw std::invalid_argument(string_format("%s must be a number", item.key().c_str()));
        }
        *value = item.value().get<double>();
        if (!(*value >= 0.0 && (is_price || *value <= 1.0))) {
            throw std::invalid_argument(
                string_format(is_price ? "%s must be 0 or more" : "%s must lie between 0 and 1", item.key().c_str()));
        }
    }
    if (thresholds.t1 > thresholds.t2) {
        throw std::invalid_argument("t1 must not be above t2: between them lies low precision");
    }
    return thresholds;
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
        for (const json & each : prompt) {
            server_hobbit_check_prompt(vocab, each, n_ctx);
        }
        return;
    }
    const size_t size = prompt.is_string() ? prompt.get<std::string>().size() : 0;
    if (size <= size_t(n_ctx) || !server_hobbit_is_cached() || size <= size_t(n_ctx) * longest_token(vocab)) {
        return;
    }
    throw std::invalid_argument(
        string_format("the prompt has %zu bytes, more than the context of %d tokens can hold; shorten it", size,
                      n_ctx));
}

server_hobbit_thresholds server_hobbit_effective(const llama_context * ctx, server_hobbit_thresholds thresholds) {
    const hobbit_model * model = llama_model_expert_cache(llama_get_model(ctx));
    if (!model) {
        return thresholds;
    }
    hobbit_info info;
    hobbit_get_info(model, &info);
    if (!thresholds.given()) {
        return { info.t1, info.t2, info.price, info.confidence };
    }
    if (std::isnan(thresholds.t1)) {
        thresholds.t1 = std::fmin(info.t1, thresholds.t2);
    }
    if (std::isnan(thresholds.t2)) {
        thresholds.t2 = std::fmax(info.t2, thresholds.t1);
    }
    if (std::isnan(thresholds.price)) {
        thresholds.price = info.price;
    }
    if (std::isnan(thresholds.confidence)) {
        thresholds.confidence = info.confidence;
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
    char                    err[1024];
    const hobbit_thresholds own = { effective.t1, effective.t2, effective.price, effective.confidence };
    if (given && !hobbit_set_sequence_thresholds(model, seq_id, &own, err, sizeof(err))) {
        return std::string("Field 'hobbit': ") + err;
    }
    return "";
}

//
// counters
//

// Of a request: what every body may have, and what it may have for each token of the context. Reading JSON takes some
// 25 bytes of memory for each.
static constexpr uint64_t BODY_BYTES  = 1 << 20;
static constexpr uint64_t TOKEN_BYTES = 512;

// Of any request, as in stock.
static constexpr uint64_t LARGEST_BODY = 100 << 20;

// The cache of the model that the server has loaded, and its last known counters. Guarded by the mutex.
static struct {
    std::mutex     mutex;
    hobbit_model * model  = nullptr; // holds a reference
    bool           cached = false;
    hobbit_info    info   = {};

    bool     is_bounded = false; // what a request may take
    uint64_t body_limit = LARGEST_BODY;

    std::vector<double> counters; // in the order of hobbit_counter_at

    std::vector<uint64_t> layer_hits, layer_misses; // [layer]
} g_cache;

// REQUIRES: the mutex is held, and there is a model
static void read_counters() {
    size_t n = 0;
    while (hobbit_counter_at(n)) {
        n++;
    }
    g_cache.counters.resize(n);
    hobbit_get_counters(g_cache.model, g_cache.counters.data(), n);
    g_cache.layer_hits.resize(g_cache.info.n_layers);
    g_cache.layer_misses.resize(g_cache.info.n_layers);
    hobbit_get_layer_uses(g_cache.model, g_cache.layer_hits.data(), g_cache.layer_misses.data(), g_cache.info.n_layers);
}

std::string server_hobbit_check_body(const std::string & content_length) {
    const uint64_t              size = std::strtoull(content_length.c_str(), nullptr, 10);
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    if (size <= g_cache.body_limit) {
        return "";
    }
    const std::string why =
        string_format("the request has %" PRIu64 " bytes, more than the context can hold; shorten it", size);
    return safe_json_to_str({ { "error", format_error_response(why, ERROR_TYPE_INVALID_REQUEST) } });
}

uint64_t server_hobbit_body_limit() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.body_limit;
}

// Bodies that do not count, and what the others may have together.
static constexpr size_t   SMALL_BODY   = 16 << 10;
static constexpr uint64_t BODIES_BYTES = 2 << 20;

static bool server_hobbit_is_bounded() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.is_bounded;
}

namespace {

// While it lives, a body is being answered.
class body_turn {
  public:
    body_turn(size_t size, const std::function<bool()> & should_stop) {
        if (size <= SMALL_BODY || !server_hobbit_is_bounded()) {
            return;
        }
        std::unique_lock<std::mutex> lock(all_.mutex);
        all_.waiting.push_back(this);
        const auto is_next = [&] {
            return all_.waiting.front() == this && (all_.n_bytes == 0 || all_.n_bytes + size <= BODIES_BYTES);
        };
        bool stops = false;
        while (!stops && !all_.changed.wait_for(lock, std::chrono::seconds(1), is_next)) {
            stops = should_stop();
        }
        all_.waiting.remove(this);
        all_.changed.notify_all();
        if (stops) {
            throw std::runtime_error("the request was left before its turn came");
        }
        counted_      = size;
        all_.n_bytes += size;
    }

    ~body_turn() {
        if (counted_ == 0) {
            return;
        }
#ifdef __GLIBC__
        malloc_trim(0); // what each thread's heap keeps would add up
#endif
        std::lock_guard<std::mutex> lock(all_.mutex);
        all_.n_bytes -= counted_;
        all_.changed.notify_all();
    }

    body_turn(const body_turn &)             = delete;
    body_turn & operator=(const body_turn &) = delete;

  private:
    struct bodies {
        std::mutex                   mutex;
        std::condition_variable      changed;
        uint64_t                     n_bytes = 0; // of those that are being answered
        std::list<const body_turn *> waiting;     // in their order
    };

    static bodies all_;

    size_t counted_ = 0;
};

body_turn::bodies body_turn::all_;

} // namespace

std::function<server_http_res_ptr(const server_http_req &)>
server_hobbit_bounded(std::function<server_http_res_ptr(const server_http_req &)> handler) {
    return [handler = std::move(handler)](const server_http_req & req) {
        const body_turn turn(req.body.size(), req.should_stop);
        try {
            return handler(req);
        } catch (const common_json_error & e) {
            throw std::invalid_argument(e.what());
        }
    };
}

static bool server_hobbit_is_cached() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.cached;
}

static std::mutex  g_failure_mutex;
static std::string g_failure; // guarded by g_failure_mutex

void server_hobbit_use(const llama_context * ctx, bool has_media) {
    hobbit_model * model = ctx ? llama_model_expert_cache(llama_get_model(ctx)) : nullptr;
    hobbit_info    info  = {};
    if (model) {
        hobbit_ref(model);
        hobbit_get_info(model, &info); // it stays, and later it would wait for a computation
    }
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    if (g_cache.model) {
        read_counters();
        hobbit_unref(g_cache.model);
    }
    g_cache.model = model;
    if (ctx) {
        g_cache.cached     = model;
        g_cache.info       = info;
        g_cache.is_bounded = model && !has_media;
        g_cache.body_limit = LARGEST_BODY;
        if (g_cache.is_bounded) {
            g_cache.body_limit = std::min(LARGEST_BODY, BODY_BYTES + llama_n_ctx(ctx) * TOKEN_BYTES);
        }
    }
}

// One value; those of one metric are neighbours.
struct hobbit_value {
    const char * key;    // in JSON
    const char * metric; // null: none
    const char * label;  // of the metric, or null
    const char * help;   // of the metric
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
        { "t1",              "threshold",    "name=\"t1\"", "Thresholds of requests without their own",      i.t1 },
        { "t2",              "threshold",    "name=\"t2\"", "",                                              i.t2 },
        { "price",           "price",        nullptr,       "Price of requests without their own",           i.price },
        { "confidence",      "confidence",   nullptr,       "Confidence of requests without their own",      i.confidence },
        { "direct_io",       nullptr,        nullptr,       "",                                              i.direct_io },
    };
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
    if (g_cache.model) {
        read_counters();
    }
    return g_cache.cached ? hobbit_values(g_cache.info, g_cache.counters) : std::vector<hobbit_value>();
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
    auto res  = std::make_unique<server_http_res>();
    res->data = safe_json_to_str(data);
    return res;
}

std::string server_hobbit_metrics() {
    std::string               text;
    std::string               previous;
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

std::function<std::unique_ptr<server_http_res>(const server_http_req &)>
server_hobbit_while_waiting(std::function<std::unique_ptr<server_http_res>(const server_http_req &)> get) {
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
static std::string without_folders(std::string text) {
    for (size_t at = text.find("'/"); at != std::string::npos; at = text.find("'/", at + 1)) {
        const size_t end = text.find('\'', at + 1);
        if (end == std::string::npos) {
            return text;
        }
        const size_t name = text.rfind('/', end) + 1;
        text.erase(at + 1, name - at - 1);
        at = text.find('\'', at + 1);
    }
    return text;
}

std::string server_hobbit_check(const llama_context * ctx) {
    char                 err[1024];
    const hobbit_model * model   = llama_model_expert_cache(llama_get_model(ctx));
    const std::string    failure = model && !hobbit_check(model, err, sizeof(err)) ? err : "";

    std::lock_guard<std::mutex> lock(g_failure_mutex);
    g_failure = failure;
    return failure;
}

std::string server_hobbit_failure() {
    {
        std::lock_guard<std::mutex> lock(g_failure_mutex);
        if (!g_failure.empty()) {
            return without_folders(g_failure);
        }
    }
    return waiting_for_disk();
}
