// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-context.h"
#include "server-hooks.h"
#include "server-http.h"

// The panel, which shows the expert cache beside the conversation, and a page that leads to it in place of llama.cpp's.

namespace {

constexpr char PANEL[] =
#include "panel.html"
    ;

constexpr char NO_PAGE[] =
    "<!doctype html><meta http-equiv=refresh content='4; url=panel'><title>pyhobbit</title>"
    "<p>This build has no page for conversations: <code>make install WEB_PAGE=ON</code> adds one by npm. "
    "<a href=panel>The panel</a> shows the expert cache, and programs find OpenAI's and Ollama's APIs here.";

server_handler page(const char * text) {
    return [text](const server_http_req &) {
        auto res          = std::make_unique<server_http_res>();
        res->content_type = "text/html; charset=utf-8";
        res->data         = text;
        return res;
    };
}

class pages_hooks : public server_hooks {
  public:
    void routes(const server_http_context & http, server_routes &) override {
        http.get("/panel", page(PANEL));
        http.get("/", page(NO_PAGE)); // llama.cpp's page has this address already where there is one
    }
};

} // namespace

server_hooks & server_hooks_pages = server_hooks_of<pages_hooks>();
