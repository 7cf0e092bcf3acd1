// SPDX-License-Identifier: MIT
#include "server-hooks.h"

#include "server-common.h"
#include "server-context.h"
#include "server-http.h"

#include <semaphore.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <regex>
#include <set>
#include <thread>
#include <utility>

// The server's report on the expert cache: GET /hobbit and /metrics have its counters, and /health tells why it
// computes nothing any more, or ends: running answers have HOBBIT_DRAIN seconds after SIGTERM.

// The cache of the model that the server has loaded, and its last known counters. Guarded by the mutex.
static struct {
    std::mutex     mutex;
    hobbit_model * model  = nullptr; // holds a reference
    bool           cached = false;
    hobbit_info    info   = {};

    std::vector<hobbit_resolved_setting> settings; // in the order of hobbit_setting_spec_at

    std::vector<double> counters; // in the order of hobbit_counter_at

    std::vector<uint64_t> layer_hits, layer_misses; // [layer]

    std::pair<int64_t, std::vector<double>> earlier, latest; // samples for rates: time in ms, counters

    std::string failure; // why the cache computes nothing any more; "": it does
} g_cache;

// --- counters

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

// One value; values of one metric are neighbours.
struct hobbit_value {
    std::string  key;    // name in JSON
    std::string  metric; // empty: none
    std::string  label;  // label of the metric; "": none
    std::string  help;   // help of the metric
    json         value;
    const char * type = "gauge";
};

static std::vector<hobbit_value> hobbit_values(const hobbit_info & info, const std::vector<double> & counters) {
    std::vector<hobbit_value> values;
#define VALUE(type, name, help)                                                                                        \
    values.push_back({ #name, #name + 2 * !std::strncmp(#name, "n_", 2), "", help, info.name });
#define BY_TIER(type, name, help)                                                                                      \
    values.push_back({ #name "_high", #name, "precision=\"high\"", help, info.name##_high });                          \
    values.push_back({ #name "_low", #name, "precision=\"low\"", help, info.name##_low });
    HOBBIT_INFO_FIELDS(VALUE, BY_TIER)
#undef VALUE
#undef BY_TIER
    std::set<std::string> thresholds; // keys of the rules' numbers
    for (size_t n = 0; const hobbit_setting_spec * spec = hobbit_rule_number_at(n); n++) {
        thresholds.insert(spec->key);
    }
    for (size_t n = 0; n < g_cache.settings.size(); n++) {
        const hobbit_setting_spec * spec = hobbit_setting_spec_at(n);
        if (!spec->is_live) {
            continue;
        }
        const hobbit_resolved_setting & own = g_cache.settings[n];
        if (thresholds.count(spec->key) > 0) {
            const std::string label = string_format("name=\"%s\"", spec->option);
            values.push_back(
                { spec->option, "threshold", label, "Thresholds of requests without their own", own.number });
        } else if (spec->choices) { // a metric is a number
            values.push_back({ spec->option, "", "", "", own.text });
        } else {
            values.push_back({ spec->option, spec->option, "", spec->help, own.number });
        }
    }
    for (size_t n = 0; n < counters.size(); n++) {
        const hobbit_counter * c     = hobbit_counter_at(n);
        const json             value = c->kind == HOBBIT_SECONDS ? json(counters[n]) : json(uint64_t(counters[n]));
        const char *           type  = c->kind == HOBBIT_STATE ? "gauge" : "counter";
        values.push_back({ c->name, c->metric, c->label ? c->label : "", c->help, value, type });
    }
    return values;
}

// The values now, or when the model was last unloaded; none without an expert cache. REQUIRES: the mutex is held
static std::vector<hobbit_value> current_values() {
    return g_cache.cached ? hobbit_values(g_cache.info, read_counters()) : std::vector<hobbit_value>();
}

// Rates since an answer of half a second ago or more, else since the first one. REQUIRES: the mutex is held, and there
// is an expert cache
static json current_rates() {
    const int64_t now = ggml_time_ms();
    if (now - g_cache.latest.first > 500) {
        g_cache.earlier = std::exchange(g_cache.latest, { now, g_cache.counters });
    }
    const auto & [then, before] = g_cache.earlier.second.empty() ? g_cache.latest : g_cache.earlier;
    const hobbit_rates rates =
        hobbit_get_rates(before.data(), g_cache.counters.data(), double(now - then) / 1e3, g_cache.info.n_token_uses);
    json found;
#define RATE(type, name, help) found[#name] = std::isfinite(rates.name) ? json(rates.name) : json();
    HOBBIT_RATES_FIELDS(RATE)
#undef RATE
    return found;
}

// The values as Prometheus text; "" without an expert cache.
static std::string metrics() {
    std::string               text, previous;
    std::vector<hobbit_value> values;
    {
        std::lock_guard<std::mutex> lock(g_cache.mutex);
        values = current_values();
    }
    for (const hobbit_value & v : values) {
        if (v.metric.empty()) {
            continue;
        }
        const std::string name = "hobbit_" + v.metric;
        if (name != previous) {
            text += "# HELP " + name + " " + v.help + "\n# TYPE " + name + " " + v.type + "\n";
        }
        text     += name + (v.label.empty() ? "" : "{" + v.label + "}") + " " + v.value.dump() + "\n";
        previous  = name;
    }
    return text;
}

// --- failure

// A disk that answers takes milliseconds.
static constexpr double LONG_READ_S = 3.0;

// The sentence on a read that takes that long, else "".
static std::string waiting_for_disk() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    const double                seconds = g_cache.model ? hobbit_oldest_read(g_cache.model) : 0.0;
    return seconds < LONG_READ_S ? "" : string_format("the disk has not answered a read for %.0f s", seconds);
}

// '/folder/model.gguf' becomes 'model.gguf'.
static std::string without_folders(const std::string & text) {
    return std::regex_replace(text, std::regex("'/([^']*/)?"), "'");
}

static std::atomic<int> g_n_running{ 0 };

void llama_server_terminate(); // server.cpp

// Ends the server when a signal asks for it: not in the signal's handler, since the thread that it interrupts may hold
// the locks that ending takes.
static struct ending {
    std::atomic<int> urgency{ 0 }; // 1: once the running answers are written, 2: now
    sem_t            asked;        // the handler posts it
    std::thread      thread;

    ending() { sem_init(&asked, 0, 0); }

    ~ending() {
        sem_post(&asked);
        if (thread.joinable()) {
            thread.join();
        }
    }

    void run() {
        while (sem_wait(&asked) != 0) {
        }
        for (int i = 0; i < 10 * drain_s() && g_n_running > 0 && urgency == 1; i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        if (urgency > 0) {
            llama_server_terminate();
        }
    }

    static int drain_s() {
        const char * seconds = std::getenv("HOBBIT_DRAIN");
        return seconds ? std::atoi(seconds) : 0;
    }
} g_ending;

// Why the cache computes nothing any more, or that the disk does not answer, without the folders of files, as
// everybody may read it; "" where it computes. Waits for no computation.
static std::string public_failure() {
    if (g_ending.urgency > 0) {
        return "the server ends when its answers are written";
    }
    {
        std::lock_guard<std::mutex> lock(g_cache.mutex);
        if (!g_cache.failure.empty()) {
            return without_folders(g_cache.failure);
        }
    }
    return waiting_for_disk();
}

// --- for other hooks

std::string server_report_failure(const llama_context * ctx, const std::string & known) {
    char                 err[1024];
    const hobbit_model * model   = llama_model_expert_cache(llama_get_model(ctx));
    std::string          failure = model && !hobbit_check(model, err, sizeof(err)) ? err : "";
    if (const char * address = llama_lost_machine()) {
        failure = string_format("the machine at %s does not answer any more; start 'pyhobbit worker' there, and this "
                                "server goes on by itself",
                                address);
    }

    std::lock_guard<std::mutex> lock(g_cache.mutex);
    g_cache.failure = failure;
    return failure.empty() ? known : failure;
}

bool server_report_is_cached() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.cached;
}

uint64_t server_report_checkpoint_bytes() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    return g_cache.cached ? g_cache.info.snapshot_bytes : UINT64_MAX;
}

std::pair<double, int32_t> server_report_layers() {
    std::lock_guard<std::mutex> lock(g_cache.mutex);
    const auto &                counters = read_counters();
    size_t                      i        = 0;
    while (i < counters.size() && std::strcmp(hobbit_counter_at(i)->name, "layers_computed") != 0) {
        i++;
    }
    return { i < counters.size() ? counters[i] : 0.0, g_cache.cached ? int32_t(g_cache.info.n_run_layers) : 0 };
}

// --- signals and tasks

void server_report_interrupt(int signal) {
    if (g_ending.urgency == 2) {
        static const char what[] = "a further signal: the server ends at once\n";
        std::_Exit(write(STDERR_FILENO, what, sizeof(what) - 1) < 0 ? 2 : 1);
    }
    const bool is_first = g_ending.urgency == 0 && signal == SIGTERM;
    g_ending.urgency    = is_first && ending::drain_s() > 0 ? 1 : 2;
    sem_post(&g_ending.asked);
}

// Tells the program that calibrates beside the server, by the socket HOBBIT_BUSY_SOCKET, when it computes.
static void say_busy(bool is_busy) {
    static const char *      number = std::getenv("HOBBIT_BUSY_SOCKET");
    static std::atomic<bool> said{ true };
    if (number && said.exchange(is_busy) != is_busy) {
        send(std::atoi(number), is_busy ? "1" : "0", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
}

bool server_report_work(bool is_work) {
    if (is_work) {
        say_busy(true);
    }
    return is_work;
}

// --- hooks

namespace {

class report_hooks : public server_hooks {
  public:
    // With null the model can be freed: its last counters are kept until another one is loaded.
    void use(llama_context * ctx) override {
        hobbit_model * model = ctx ? llama_model_expert_cache(llama_get_model(ctx)) : nullptr;
        hobbit_info    info  = {};

        std::vector<hobbit_resolved_setting> settings;
        if (model) { // both stay as they are; reading them later would wait for a computation
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
        }
    }

    // The model stays while a request is read. A machine that was lost may come back: the model is unloaded at once.
    void idle(int64_t & ms) override {
        say_busy(false);
        ms = g_n_running > 0 ? -1 : llama_lost_machine() ? 0 : ms;
    }

    // Requests for a computation are refused while a machine is lost: the model has to be loaded again first.
    void wrap(server_handler & handler) override {
        handler = [inner = std::move(handler)](const server_http_req & req) {
            const std::shared_ptr<void> running((g_n_running++, &g_n_running), [](void *) { g_n_running--; });

            const std::string reason   = llama_lost_machine() && !req.body.empty() ? public_failure() : "";
            auto              response = reason.empty() ? inner(req) : server_refusal(reason, 503);
            const auto        finish   = response->finish ? std::move(response->finish) : [] {};
            response->finish           = [finish, running] { finish(); }; // lives as long as the response
            return response;
        };
    }

    void routes(const server_http_context & http, server_routes & routes) override {
        g_ending.thread   = std::thread([] { g_ending.run(); });
        routes.get_health = [get = routes.get_health](const server_http_req & req) {
            const std::string reason = public_failure();
            return reason.empty() ? get(req) : server_refusal(reason, 503);
        };
        // this waits for the computation, unless the disk does not answer
        routes.get_metrics = [get = routes.get_metrics](const server_http_req & req) {
            auto res = waiting_for_disk().empty() ? get(req) : std::make_unique<server_http_res>();
            if (res->data.empty()) {
                res->content_type = "text/plain; version=0.0.4";
            }
            res->data += res->status == 200 ? metrics() : "";
            return res;
        };
        http.get("/panel", get_panel);
        http.get("/", get_panel); // llama.cpp's page has this address already where there is one
        const bool is_router = http.handlers.count("/models/unload") > 0;
        http.get("/hobbit", is_router ? routes.get_slots : get_hobbit);
    }

  private:
    // The panel shows the counters beside the conversation, and takes the place of llama.cpp's page where that is not
    // built.
    static std::unique_ptr<server_http_res> get_panel(const server_http_req &) {
        static constexpr char PANEL[] =
#include "panel.html"
            ;
        auto res          = std::make_unique<server_http_res>();
        res->content_type = "text/html; charset=utf-8";
        res->data         = PANEL;
        return res;
    }

    static std::unique_ptr<server_http_res> get_hobbit(const server_http_req &) {
        json data = json::object();
        {
            std::lock_guard<std::mutex> lock(g_cache.mutex); // one lock, so that all values are of one moment
            const auto                  values = current_values();
            data["cached"]                     = !values.empty();
            for (const hobbit_value & v : values) {
                data[v.key] = v.value;
            }
            if (!values.empty()) {
                data["rates"]           = current_rates();
                data["hits_by_layer"]   = g_cache.layer_hits;
                data["misses_by_layer"] = g_cache.layer_misses;
            }
        }
        if (data.size() > 1) {
            server_call(&server_hooks::values, data);
        }
        return server_answer(data);
    }
};

} // namespace

server_hooks & server_hooks_report = server_hooks_of<report_hooks>();
