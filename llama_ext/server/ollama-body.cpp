// SPDX-License-Identifier: MIT
#include "ollama-body.h"

#include "server-common.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <stdexcept>

int64_t server_ollama_duration_ms(const json & value) {
    static const std::map<std::string, double> units = { { "", 1e3 }, { "s", 1e3 }, { "m", 60e3 }, { "h", 3600e3 } };

    constexpr double MOST = 100 * 365 * 86400e3;

    const std::string text   = value.is_string() ? value.get<std::string>() : value.dump();
    char *            rest   = nullptr;
    const double      number = std::strtod(text.c_str(), &rest);
    const auto        unit   = units.find(rest);
    const double      ms     = rest == text.c_str() || unit == units.end() ? MOST : number * unit->second;
    if (!(std::abs(ms) < MOST)) {
        throw std::invalid_argument("keep_alive must be seconds, or a text like 5m");
    }
    return int64_t(ms);
}

std::string server_ollama_name(const json & body) {
    const json given = body.value("model", body.value("name", json("")));
    if (!given.is_string()) {
        throw std::invalid_argument("model must be a text");
    }
    const std::string name   = given.get<std::string>();
    const std::string latest = ":latest";
    return string_ends_with(name, latest) ? name.substr(0, name.size() - latest.size()) : name;
}

// Templates want one id with each call and its result: Ollama's messages have none, but come in order.
struct call_ids {
    using waiting = std::pair<std::string, std::string>; // name, id

    int                  n_calls = 0;
    std::vector<waiting> calls; // without a result so far

    // Nine letters and digits: some templates refuse others.
    std::string add(const std::string & name) {
        calls.emplace_back(name, string_format("call%05d", n_calls++ % 100000));
        return calls.back().second;
    }

    // The id of the first call of that name, or of any where the result names none.
    std::string take(const std::string & name) {
        const auto is_it = [&](const waiting & call) { return name.empty() || call.first == name; };
        const auto found = std::find_if(calls.begin(), calls.end(), is_it);
        if (found == calls.end()) {
            return add(name);
        }
        const std::string id = found->second;
        calls.erase(found);
        return id;
    }
};

static json openai_message(json message, call_ids & ids) {
    if (message.contains("images")) {
        json parts = json::array({ json{ { "type", "text" }, { "text", message.value("content", "") } } });
        for (const json & image : message.at("images")) {
            const std::string url = "data:image/png;base64," + image.get<std::string>();
            parts.push_back({ { "type", "image_url" }, { "image_url", json{ { "url", url } } } });
        }
        message["content"] = parts;
    }
    if (message.contains("tool_calls")) {
        for (json & call : message.at("tool_calls")) {
            call["type"]                  = "function";
            call["id"]                    = ids.add(call.at("function").value("name", ""));
            call["function"]["arguments"] = call.at("function").at("arguments").dump();
        }
    }
    if (message.value("role", "") == "tool" && !message.contains("tool_call_id")) {
        message["tool_call_id"] = ids.take(message.value("tool_name", ""));
        if (message.contains("tool_name")) {
            message["name"] = message.at("tool_name");
        }
    }
    return message;
}

json server_ollama_body(const json & body, bool is_chat, bool is_raw) {
    json out = body.value("options", json::object()); // llama-server has the same names, but for one
    if (out.contains("num_predict")) {
        out["max_tokens"] = out.at("num_predict");
    }
    for (const char * key : { "tools", "hobbit" }) {
        if (body.contains(key)) {
            out[key] = body.at(key);
        }
    }
    out["model"]  = server_ollama_name(body);
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
    call_ids ids;
    for (const json & message : messages) {
        out["messages"].push_back(openai_message(message, ids));
    }
    return out;
}
