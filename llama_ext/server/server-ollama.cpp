// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-context.h"
#include "server-hooks.h"
#include "server-http.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <ctime>

// Ollama's API, which many programs know alone: mapped to the server's own handlers. And the panel, a page that shows
// the expert cache beside the conversation.

static constexpr const char * VERSION   = "0.12.0"; // the API's
static constexpr int64_t      NOT_GIVEN = INT64_MIN;

static std::atomic<int64_t> g_idle_ms = NOT_GIVEN; // by keep_alive of the last request

// The handlers that requests are mapped to. A router passes requests to the models' servers as they are.
struct ollama_routes {
    server_handler chat, completions, models, props, adapters;
    server_handler unload; // a router has it, others null
};

// Milliseconds of a number of seconds, or of a text like 90s, 5m or 1h30m.
static int64_t duration_ms(const json & value) {
    const std::string                          text = value.is_string() ? value.get<std::string>() : value.dump() + "s";
    static const std::map<std::string, double> units = {
        { "ms", 1 }, { "s", 1e3 }, { "m", 60e3 }, { "h", 3600e3 }, { "", 1e3 }
    };
    double       sum = 0;
    const char * at  = text.c_str();
    do {
        char *            end    = nullptr;
        const double      number = std::strtod(at, &end);
        const std::string unit(end, std::strspn(end, "hms"));
        if (end == at || !units.count(unit) || !(std::abs(number) < 1e9)) {
            throw std::invalid_argument("keep_alive must be seconds, or a text like 5m");
        }
        sum += std::abs(number) * units.at(unit);
        at   = end + unit.size();
    } while (*at);
    return int64_t(text[0] == '-' ? -sum : sum);
}

static std::string now() {
    const std::time_t t = std::time(nullptr);
    std::tm           utc;
    char              text[32];
    std::strftime(text, sizeof(text), "%FT%TZ", gmtime_r(&t, &utc));
    return text;
}

// Clients that know tags send NAME:latest.
static std::string name_of(const json & body) {
    const std::string name   = body.value("model", body.value("name", ""));
    const std::string latest = ":latest";
    return string_ends_with(name, latest) ? name.substr(0, name.size() - latest.size()) : name;
}

//
// requests
//

static json openai_message(json message) {
    if (message.contains("images")) {
        json parts = json::array({ json{ { "type", "text" }, { "text", message.value("content", "") } } });
        for (const json & image : message.at("images")) {
            const std::string url = "data:image/png;base64," + image.get<std::string>();
            parts.push_back({ { "type", "image_url" }, { "image_url", json{ { "url", url } } } });
        }
        message["content"] = parts;
    }
    if (message.contains("tool_calls")) {
        size_t n = 0;
        for (json & call : message.at("tool_calls")) {
            call["type"]                  = "function";
            call["id"]                    = "call_" + std::to_string(n++);
            call["function"]["arguments"] = call.at("function").at("arguments").dump();
        }
    }
    return message;
}

static json openai_body(const json & body, bool is_chat, bool is_raw) {
    json out = body.value("options", json::object()); // llama-server has the same names, but for one
    if (out.contains("num_predict")) {
        out["max_tokens"] = out.at("num_predict");
    }
    for (const char * key : { "tools", "hobbit" }) {
        if (body.contains(key)) {
            out[key] = body.at(key);
        }
    }
    out["model"]  = name_of(body);
    out["stream"] = json_value(body, "stream", true);
    if (const json think = body.value("think", json()); !think.is_null()) {
        out["chat_template_kwargs"] = json{ { think.is_string() ? "reasoning_effort" : "enable_thinking", think } };
    }
    if (const json format = body.value("format", json()); format.is_object()) {
        out["response_format"] = json{ { "type", "json_schema" }, { "json_schema", json{ { "schema", format } } } };
    } else if (format == "json") {
        out["response_format"] = json{ { "type", "json_object" } };
    }
    if (is_raw) {
        out["prompt"] = body.at("prompt");
        return out;
    }
    json messages = body.value("messages", json::array());
    if (!is_chat) {
        if (body.contains("system")) {
            messages.push_back({ { "role", "system" }, { "content", body.at("system") } });
        }
        json message = { { "role", "user" }, { "content", body.at("prompt") } };
        if (body.contains("images")) {
            message["images"] = body.at("images");
        }
        messages.push_back(message);
    }
    out["messages"] = json::array();
    for (const json & message : messages) {
        out["messages"].push_back(openai_message(message));
    }
    return out;
}

//
// answers
//

// Forms an answer in Ollama's way from OpenAI's, whole or in pieces. Reads from `inner`, which reads from `request`.
struct ollama_res : server_http_res {
    ollama_res(server_http_req && request, std::string model, bool is_chat) :
        request(std::move(request)), model(std::move(model)), is_chat(is_chat) {}

    void on_complete() override {
        if (inner) {
            inner->on_complete();
        }
    }

    // A line of the answer. fields: of the message
    json line(const json & fields) const {
        json   out   = { { "model", model }, { "created_at", now() }, { "done", false } };
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

    // The last line. reason: why the answer ends.  t: timings of the server
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
            const size_t start = pending.find("data: ");
            const json   event = json::parse_no_throw(start < end ? pending.substr(start + 6, end - start - 6) : "");
            pending.erase(0, end + 2);
            out += event.is_discarded() ? "" : lines(event); // a ping, or the end
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
    const std::string model    = name_of(body);
    const json        keep     = body.value("keep_alive", json());
    const bool        unloads  = !keep.is_null() && duration_ms(keep) == 0;
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
        auto res      = routes.chat(changed(req, req.path, body));
        if (!res->is_stream()) {
            res->data = form.lines(json::parse(res->data));
        }
        return res;
    }
    g_idle_ms = keep.is_null() ? NOT_GIVEN : duration_ms(keep);
    if (is_empty) {
        if (!unloads) {
            routes.adapters(req); // any task loads a model that sleeps, and its idle time begins anew
        }
        return server_answer(form.last_line({}, unloads ? "unload" : "load"));
    }
    const std::string path = is_raw ? "/v1/completions" : "/v1/chat/completions";
    auto res    = std::make_unique<ollama_res>(changed(req, path, openai_body(body, is_chat, is_raw)), model, is_chat);
    res->inner  = (is_raw ? routes.completions : routes.chat)(res->request);
    res->finish = [self = res.get()] {
        auto & inner = *self->inner;
        std::string().swap(self->request.body);
        if (inner.finish) {
            inner.finish();
        }
        self->status = inner.status;
        if (!inner.is_stream()) {
            self->data = inner.data.empty() ? "" : self->lines(json::parse(inner.data)); // "": the client left
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

//
// models
//

// One entry for each name of each model, with what handlers tell of it; loaded_only: one for each in memory.
static json models(const server_http_req & req, const ollama_routes & routes, bool loaded_only) {
    const json props = routes.unload ? json::object() : json::parse(routes.props(req)->data);
    const json all   = json::parse(routes.models(req)->data);
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
            json entry           = { { "name", name }, { "model", name }, { "digest", "" }, { "meta", meta } };
            entry["size"]        = int64_t(meta.value("size", 0.0));
            entry["modified_at"] = now();
            entry["details"]     = json{ { "format", "gguf" }, { "quantization_level", meta.value("ftype", "") } };
            out.push_back(entry);
        }
    }
    return { { "models", out } };
}

static server_http_res_ptr show(const server_http_req & req, const ollama_routes & routes) {
    const std::string name  = name_of(json::parse(req.body));
    const json        found = models(req, routes, false);
    for (const json & model : found.at("models")) {
        if (model.at("name") != name) {
            continue;
        }
        const json props = routes.unload ? json::object() : json::parse(routes.props(req)->data);
        json       out   = model;
        out["template"]  = props.value("chat_template", "");
        // clients look for the context under the architecture's name, which no handler tells
        out["model_info"]   = json{ { "general.architecture", "hobbit" },
                                    { "hobbit.context_length", int64_t(model.at("meta").value("n_ctx", 0.0)) } };
        out["capabilities"] = json::array({ "completion" });
        if (props.value("chat_template_caps", json::object()).value("supports_tools", false)) {
            out["capabilities"].push_back("tools");
        }
        if (props.value("modalities", json::object()).value("vision", false)) {
            out["capabilities"].push_back("vision");
        }
        return server_answer(out);
    }
    return server_answer({ { "error", "model '" + name + "' not found" } }, 404);
}

static server_handler api(server_handler own) {
    server_call(&server_hooks::wrap, own);
    return [own](const server_http_req & req) -> server_http_res_ptr {
        try {
            return own(req);
        } catch (const std::exception & e) {
            const bool is_bad =
                dynamic_cast<const std::invalid_argument *>(&e) || dynamic_cast<const common_json_error *>(&e);
            return server_answer({ { "error", e.what() } }, is_bad ? 400 : 500);
        }
    };
}

namespace {

class ollama_hooks : public server_hooks {
  public:
    void idle(int64_t & ms) override {
        const int64_t given = g_idle_ms;
        ms                  = given == NOT_GIVEN ? ms : given;
    }

    void routes(const server_http_context & http, server_routes & own) override {
        const auto          unload = http.handlers.find("/models/unload");
        const ollama_routes routes = { own.post_chat_completions,
                                       own.post_completions_oai,
                                       own.get_models,
                                       own.get_props,
                                       own.get_lora_adapters,
                                       unload == http.handlers.end() ? nullptr : unload->second };
        for (const bool is_chat : { true, false }) {
            http.post(is_chat ? "/api/chat" : "/api/generate",
                      api([routes, is_chat](const auto & req) { return generate(req, routes, is_chat); }));
        }
        http.post("/api/show", api([routes](const auto & req) { return show(req, routes); }));
        http.get("/api/tags", api([routes](const auto & req) { return server_answer(models(req, routes, false)); }));
        http.get("/api/ps", api([routes](const auto & req) { return server_answer(models(req, routes, true)); }));
        http.get("/api/version", api([](const auto &) { return server_answer({ { "version", VERSION } }); }));
        http.get("/panel", [](const server_http_req &) {
            static constexpr const char page[] =
#include "panel.html"
                ;
            auto res          = std::make_unique<server_http_res>();
            res->content_type = "text/html; charset=utf-8";
            res->data         = page;
            return res;
        });
    }
};

} // namespace

server_hooks & server_hooks_ollama() {
    static ollama_hooks hooks;
    return hooks;
}
