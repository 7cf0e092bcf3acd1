// SPDX-License-Identifier: MIT
#pragma once

// Ollama's API, which many programs know alone: mapped to the server's own handlers. And the panel, a page that shows
// the expert cache beside the conversation.

#include "server-http.h"

// The handlers that requests are mapped to. A router passes requests to the models' servers as they are.
struct server_ollama_routes {
    server_http_context::handler_t chat, completions, models, props, adapters;
    server_http_context::handler_t unload; // a router has it, others null
};

// Adds /api/... and /panel.
void server_ollama_add_routes(const server_http_context & http, const server_ollama_routes & routes);

// Milliseconds without a request after which the model is unloaded: by keep_alive of the last request, else
// `own`. Negative: never. Any thread may call it.
int64_t server_ollama_idle_ms(int64_t own);
