// SPDX-License-Identifier: MIT
#include "base64.hpp"
#include "ollama-body.h"
#include "server-common.h"
#include "server-context.h"
#include "server-hooks.h"
#include "server-http.h"

#include <atomic>
#include <cstring>
#include <ctime>

// Ollama's API, which many programs know alone: mapped to the server's own handlers.

static constexpr const char * VERSION   = "0.12.0"; // version of the API
static constexpr const char * FAMILY    = "hobbit"; // family of all models: clients look for the context under it
static constexpr int64_t      NOT_GIVEN = INT64_MIN;

// Milliseconds of keep_alive: of the last request, and of the one that this thread reads. And of the server's option.
static std::atomic<int64_t> g_idle_ms = NOT_GIVEN;
static thread_local int64_t g_keep_ms = NOT_GIVEN;
static std::atomic<int64_t> g_own_ms  = -1;

static int64_t idle_ms() {
    const int64_t given = g_idle_ms;
    return given == NOT_GIVEN ? g_own_ms.load() : given;
}

// The handlers that requests are mapped to. A router passes requests to the models' servers as they are.
struct ollama_routes {
    const server_routes & own;
    server_handler        unload; // a router has it, others null
};

static std::string time_text(std::time_t t = std::time(nullptr)) {
    std::tm utc;
    char    text[32];
    std::strftime(text, sizeof(text), "%FT%TZ", gmtime_r(&t, &utc));
    return text;
}

// 64 hexadecimal digits, by which clients tell models apart: they are the same for the same name and sizes.
static std::string digest(const std::string & text) {
    return string_format("%016llx%048d", static_cast<unsigned long long>(server_hash(text)), 0);
}

// --- answers

// Forms an answer in Ollama's way from OpenAI's, whole or in pieces. Reads from `inner`, which reads from `request`.
struct ollama_res : server_http_res {
    ollama_res(server_http_req && request, std::string model, bool is_chat) :
        request(std::move(request)), model(std::move(model)), is_chat(is_chat) {}

    // fields: of the message
    json line(const json & fields) const {
        json   out   = { { "model", model }, { "created_at", time_text() }, { "done", false } };
        json   own   = { { "role", "assistant" }, { "content", "" } };
        json & place = is_chat ? own : out;
        if (!is_chat) {
            out["response"] = "";
        }
        for (const auto & [key, value] : fields.items()) {
            place[key == "content" && !is_chat ? "response" : key] = value;
        }
        if (is_chat) {
            out["message"] = own;
        }
        return out;
    }

    // reason: why the answer ends.  t: timings of the server
    json last_line(const json & fields, const std::string & reason, const json & t = json::object()) const {
        const auto get = [&](const char * key, double unit) { return int64_t(t.value(key, 0.0) * unit); };

        json out                    = line(fields);
        out["done"]                 = true;
        out["done_reason"]          = reason;
        out["prompt_eval_count"]    = get("prompt_n", 1) + get("cache_n", 1);
        out["prompt_eval_duration"] = get("prompt_ms", 1e6);
        out["eval_count"]           = get("predicted_n", 1);
        out["eval_duration"]        = get("predicted_ms", 1e6);
        out["total_duration"]       = get("prompt_ms", 1e6) + get("predicted_ms", 1e6);
        return out;
    }

    // The lines that one event gives, or the whole answer.
    std::string lines(const json & event) {
        if (event.contains("error")) {
            const json & error = event.at("error");
            return json{ { "error", error.is_object() ? error.at("message") : error } }.dump() + "\n";
        }
        if (event.value("choices", json::array()).empty()) {
            return "";
        }
        const json & choice = event.at("choices").at(0);
        const json   part   = choice.value(choice.contains("message") ? "message" : "delta", choice);
        json         fields = json::object();
        for (const auto & [from, to] :
             { std::pair("content", "content"), { "text", "content" }, { "reasoning_content", "thinking" } }) {
            if (const json text = part.value(from, json()); text.is_string() && text != "") {
                fields[to] = text;
            }
        }
        for (const json & call : part.value("tool_calls", json::array())) {
            const size_t i = call.value("index", calls.size());
            calls.resize(std::max(calls.size(), i + 1));
            calls[i].first  += call.at("function").value("name", "");
            calls[i].second += call.at("function").value("arguments", "");
        }
        std::string out;
        if (next && !fields.empty()) {
            out    = safe_json_to_str(line(fields)) + "\n";
            fields = json::object();
        }
        const json reason = choice.value("finish_reason", json());
        if (reason.is_null()) {
            return out;
        }
        for (const auto & [name, text] : calls) {
            const json arguments = json::parse_no_throw(text);
            const json function  = { { "name", name },
                                     { "arguments", arguments.is_discarded() ? json::object() : arguments } };
            fields["tool_calls"] = fields.value("tool_calls", json::array());
            fields["tool_calls"].push_back({ { "function", function } });
        }
        const json t = event.value("timings", json::object());
        return out + safe_json_to_str(last_line(fields, reason == "length" ? "length" : "stop", t)) + "\n";
    }

    // The lines of what has arrived of a stream.
    std::string take(const std::string & chunk) {
        pending += chunk;
        std::string out;
        for (size_t end = pending.find("\n\n"); end != std::string::npos; end = pending.find("\n\n")) {
            const size_t start   = pending.find("data: ");
            const json   event   = json::parse_no_throw(start < end ? pending.substr(start + 6, end - start - 6) : "");
            const bool   is_ping = pending[0] == ':'; // a ping says that the server lives
            pending.erase(0, end + 2);
            out += is_ping ? safe_json_to_str(line(json::object())) + "\n" : event.is_discarded() ? "" : lines(event);
        }
        return out;
    }

    server_http_req     request;
    server_http_res_ptr inner;
    const std::string   model;
    const bool          is_chat;
    std::string         pending;

    std::vector<std::pair<std::string, std::string>> calls; // name, arguments
};

static server_http_req changed(const server_http_req & req, const std::string & path, const json & body) {
    server_http_req out = { req.params, req.headers, path, req.query_string, body.dump(), {}, req.should_stop };
    out.headers.erase("Content-Length");
    return out;
}

static server_http_res_ptr generate(const server_http_req & req, const ollama_routes & routes, bool is_chat) {
    json              body     = json::parse(req.body);
    const std::string model    = server_ollama_name(body);
    const json        keep     = body.value("keep_alive", json());
    const bool        unloads  = !keep.is_null() && server_ollama_duration_ms(keep) == 0;
    const bool        is_raw   = !is_chat && json_value(body, "raw", false);
    const json        prompt   = body.value(is_chat ? "messages" : "prompt", json());
    const bool        is_empty = prompt.is_string() ? prompt == "" : prompt.empty();
    ollama_res        form(changed(req, req.path, {}), model, is_chat);
    if (routes.unload) { // a router's model is another server's, which maps the request itself
        if (is_empty && unloads) {
            routes.unload(changed(req, req.path, { { "model", model } })); // an error says that it is not loaded
            return server_answer(form.last_line({}, "unload"));
        }
        body["model"] = model;
        auto res      = routes.own.post_chat_completions(changed(req, req.path, body));
        if (!res->is_stream()) {
            res->data = form.lines(json::parse(res->data));
        }
        return res;
    }
    g_keep_ms = keep.is_null() ? NOT_GIVEN : server_ollama_duration_ms(keep);
    if (is_empty) {
        g_idle_ms = g_keep_ms;
        if (!unloads) {
            routes.own.get_lora_adapters(req); // any task loads a model that sleeps, and its idle time begins anew
        }
        return server_answer(form.last_line({}, unloads ? "unload" : "load"));
    }
    const std::string path = is_raw ? "/v1/completions" : "/v1/chat/completions";
    auto              res =
        std::make_unique<ollama_res>(changed(req, path, server_ollama_body(body, is_chat, is_raw)), model, is_chat);
    res->inner  = (is_raw ? routes.own.post_completions_oai : routes.own.post_chat_completions)(res->request);
    res->finish = [self = res.get()] {
        auto & inner = *self->inner;
        std::string().swap(self->request.body);
        if (inner.finish) {
            inner.finish();
        }
        self->status = inner.status;
        if (!inner.is_stream()) {
            self->data = inner.data.empty() ? "" : self->lines(json::parse(inner.data)); // the client left: ""
            return;
        }
        self->content_type = "application/x-ndjson";
        self->next         = [self](std::string & out) {
            std::string chunk;
            const bool  has_more = self->inner->next(chunk);
            out                  = self->take(chunk);
            return has_more;
        };
    };
    return res;
}

// is_old: the route takes one text, and answers with one vector
static server_http_res_ptr embed(const server_http_req & req, const ollama_routes & routes, bool is_old) {
    json              body  = json::parse(req.body);
    const std::string model = server_ollama_name(body);
    if (routes.unload) { // as above
        body["model"] = model;
        return routes.own.post_embeddings_oai(changed(req, req.path, body));
    }
    json input               = { { "model", model }, { "input", body.at(is_old ? "prompt" : "input") } };
    input["encoding_format"] = "base64"; // a tree of all numbers would take many times that
    auto inner               = routes.own.post_embeddings_oai(changed(req, "/v1/embeddings", input));
    if (inner->status != 200) {
        return inner;
    }
    const json answer = json::parse(inner->data);
    auto   res = server_answer({ { "model", model }, { "prompt_eval_count", answer.at("usage").at("prompt_tokens") } });
    auto & out = res->data;
    out.reserve(inner->data.size() * 4); // a number of 5 bytes gets some 20
    out.replace(out.size() - 1, 1, is_old ? ",\"embedding\":" : ",\"embeddings\":[");
    for (size_t i = 0; i < (is_old ? 1 : answer.at("data").size()); i++) {
        const std::string  bytes = base64::decode(answer.at("data").at(i).at("embedding").get<std::string>());
        std::vector<float> numbers(bytes.size() / sizeof(float));
        std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(float));
        out += json(numbers).dump() + ",";
    }
    out.replace(out.size() - 1, 1, is_old ? "}" : "]}"); // the last comma
    return res;
}

// --- models

// One entry for each name of each model, with what handlers tell of it; loaded_only: one for each in memory.
static json models(const server_http_req & req, const ollama_routes & routes, bool loaded_only) {
    const json props = routes.unload ? json::object() : json::parse(routes.own.get_props(req)->data);
    const json all   = json::parse(routes.own.get_models(req)->data);
    json       out   = json::array();
    for (const json & model : all.at("data")) {
        const json        own   = props.value("is_sleeping", false) ? "sleeping" : "loaded";
        const std::string state = model.value("status", json::object()).value("value", own).get<std::string>();
        const json        meta  = model.value("meta", json::object());
        const json        id    = model.at("id");
        json              names = json::array({ id });
        for (const json & alias : model.value("aliases", json::array())) {
            if (alias != id) {
                names.push_back(alias);
            }
        }
        for (const json & name : names) {
            if (loaded_only && (state != "loaded" || name != id)) {
                continue;
            }
            const int64_t n_params  = int64_t(meta.value("n_params", 0.0));
            const int64_t size      = int64_t(meta.value("size", 0.0));
            json          entry     = { { "name", name }, { "model", name }, { "size", size } };
            entry["digest"]         = digest(id.get<std::string>() + ' ' + meta.dump());
            entry["modified_at"]    = time_text(std::time_t(model.at("created").get<int64_t>()));
            entry["details"]        = json{ { "format", "gguf" },
                                            { "family", FAMILY },
                                            { "parameter_size", string_format("%.1fB", double(n_params) / 1e9) },
                                            { "quantization_level", meta.value("ftype", "") } };
            entry["context_length"] = int64_t(meta.value("n_ctx", 0.0));
            if (loaded_only) {
                const int64_t ms    = idle_ms();
                entry["expires_at"] = time_text(std::time(nullptr) + (ms < 0 ? 100LL * 365 * 86400 : ms / 1000));
            }
            out.push_back(entry);
        }
    }
    return { { "models", out } };
}

static server_http_res_ptr show(const server_http_req & req, const ollama_routes & routes) {
    const std::string name  = server_ollama_name(json::parse(req.body));
    const json        found = models(req, routes, false);
    for (const json & model : found.at("models")) {
        if (model.at("name") != name) {
            continue;
        }
        const json props    = routes.unload ? json::object() : json::parse(routes.own.get_props(req)->data);
        json       out      = model;
        out["template"]     = props.value("chat_template", "");
        out["model_info"]   = json{ { "general.architecture", FAMILY },
                                    { std::string(FAMILY) + ".context_length", model.at("context_length") } };
        out["capabilities"] = json::array({ "completion" });
        if (props.value("chat_template_caps", json::object()).value("supports_tools", false)) {
            out["capabilities"].push_back("tools");
        }
        if (props.value("modalities", json::object()).value("vision", false)) {
            out["capabilities"].push_back("vision");
        }
        return server_answer(out);
    }
    return server_refusal("model '" + name + "' not found", 404);
}

static server_handler api(server_handler own) {
    server_call(&server_hooks::wrap, own);
    return [own](const server_http_req & req) -> server_http_res_ptr {
        const std::shared_ptr<void> end(nullptr, [](void *) { g_keep_ms = NOT_GIVEN; });
        try { // a refusal has OpenAI's form
            auto       res   = own(req);
            const json error = res->status < 400 ? json() : json::parse_no_throw(res->data).value("error", json());
            return error.is_object() ? server_answer({ { "error", error.at("message") } }, res->status)
                                     : std::move(res);
        } catch (const std::exception & e) {
            const bool is_bad = dynamic_cast<const std::invalid_argument *>(&e) != nullptr;
            const json error = format_error_response(e.what(), is_bad ? ERROR_TYPE_INVALID_REQUEST : ERROR_TYPE_SERVER);
            return server_answer({ { "error", error.at("message") } }, error.at("code").get<int>());
        }
    };
}

namespace {

class ollama_hooks : public server_hooks {
  public:
    void start(common_params & params) override { g_own_ms = int64_t(params.sleep_idle_seconds) * 1000; }

    // Any request for text says when the model is unloaded: by its own keep_alive, or by the server's option.
    void request(task_params &) override { g_idle_ms = g_keep_ms; }

    void idle(int64_t & ms) override { ms = idle_ms(); }

    void routes(const server_http_context & http, server_routes & own) override {
        const auto          unload = http.handlers.find("/models/unload");
        const ollama_routes routes = { own, unload == http.handlers.end() ? nullptr : unload->second };
        for (const bool is_chat : { true, false }) {
            http.post(is_chat ? "/api/chat" : "/api/generate",
                      api([routes, is_chat](const auto & req) { return generate(req, routes, is_chat); }));
        }
        for (const bool is_old : { true, false }) {
            http.post(is_old ? "/api/embeddings" : "/api/embed",
                      api([routes, is_old](const auto & req) { return embed(req, routes, is_old); }));
        }
        for (const char * path : { "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete" }) {
            const auto refuse = api([](const auto &) {
                return server_answer({ { "error", "run pyhobbit pull or pyhobbit rm: the server does neither" } }, 501);
            });
            http.post(path, refuse);
            http.del(path, refuse);
        }
        http.post("/api/show", api([routes](const auto & req) { return show(req, routes); }));
        http.get("/api/tags", api([routes](const auto & req) { return server_answer(models(req, routes, false)); }));
        http.get("/api/ps", api([routes](const auto & req) { return server_answer(models(req, routes, true)); }));
        http.get("/api/version", api([](const auto &) { return server_answer({ { "version", VERSION } }); }));
    }
};

} // namespace

server_hooks & server_hooks_ollama = server_hooks_of<ollama_hooks>();
