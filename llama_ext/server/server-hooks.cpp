// SPDX-License-Identifier: MIT
#include "server-hooks.h"

#include "server-common.h"
#include "server-http.h"

// SERVER_HOOKS: HOOKS(NAME) for each file server-NAME.cpp, as cmake/llama-options.cmake found them.
#define HOOKS(name) extern server_hooks & server_hooks_##name;
SERVER_HOOKS
#undef HOOKS

#define HOOKS(name) &server_hooks_##name,
const std::vector<server_hooks *> & server_hooks_all() {
    static const std::vector<server_hooks *> all = { SERVER_HOOKS };
    return all;
}

std::unique_ptr<server_http_res> server_answer(const json & data, int status) {
    auto res    = std::make_unique<server_http_res>();
    res->status = status;
    res->data   = safe_json_to_str(data);
    return res;
}

std::unique_ptr<server_http_res> server_refusal(const std::string & message, int status) {
    const bool is_ours = status >= 500;
    json       error   = format_error_response(message, is_ours ? ERROR_TYPE_UNAVAILABLE : ERROR_TYPE_INVALID_REQUEST);
    error["code"]      = status;
    return server_answer({ { "error", error } }, status);
}

int64_t server_override(const common_params & params, const std::string & key, int64_t value) {
    const auto & kvs   = params.kv_overrides;
    const auto   is_it = [&](const auto & kv) { return kv.key == key && kv.tag == LLAMA_KV_OVERRIDE_TYPE_INT; };
    const auto   given = std::find_if(kvs.begin(), kvs.end(), is_it);
    return given == kvs.end() ? value : given->val_i64;
}

void server_add_override(common_params & params, const std::string & key, int64_t value) {
    auto & kvs = params.kv_overrides;
    if (std::any_of(kvs.begin(), kvs.end(), [&](const auto & kv) { return kv.key == key; })) {
        return;
    }
    llama_model_kv_override kv = {};
    kv.tag                     = LLAMA_KV_OVERRIDE_TYPE_INT;
    kv.val_i64                 = value;
    key.copy(kv.key, sizeof(kv.key) - 1);
    kvs.resize(std::max<size_t>(kvs.size(), 1)); // the end
    kvs.insert(kvs.begin(), kv);
}

size_t server_save_slot(llama_context * ctx, const char * path, llama_seq_id seq_id, const llama_token * tokens,
                        size_t n_tokens) {
    const std::string fresh   = std::string(path) + ".new";
    const size_t      n_bytes = llama_state_seq_save_file(ctx, fresh.c_str(), seq_id, tokens, n_tokens);
    if (n_bytes == 0 || std::rename(fresh.c_str(), path) != 0) {
        const std::string reason = std::strerror(errno);
        std::remove(fresh.c_str());
        throw std::runtime_error("Unable to save slot: " + reason);
    }
    return n_bytes;
}

common_chat_msg server_parse_chat(const common_chat_msg & before, const std::string & text, bool is_partial,
                                  const common_chat_parser_params & params) {
    try {
        return common_chat_parse(text, is_partial, params);
    } catch (const std::runtime_error & e) {
        SRV_WRN("%s\n", e.what());
    }
    common_chat_msg kept = before;
    kept.role            = "assistant";
    if (!is_partial && before.tool_calls.empty()) {
        const std::string & begun = before.reasoning_content;
        const size_t        at    = begun.empty() ? 0 : text.find(begun);
        const std::string   rest  = at == std::string::npos ? "" : text.substr(at + begun.size());
        kept.content              = string_starts_with(rest, before.content) ? rest : before.content;
    }
    return kept;
}
