// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-context.h"
#include "server-hooks.h"
#include "server-http.h"

// The panel, which shows the expert cache beside the conversation, and takes the place of llama.cpp's page where that
// is not built.

namespace {

constexpr char PANEL[] =
#include "panel.html"
    ;

std::unique_ptr<server_http_res> panel(const server_http_req &) {
    auto res          = std::make_unique<server_http_res>();
    res->content_type = "text/html; charset=utf-8";
    res->data         = PANEL;
    return res;
}

class pages_hooks : public server_hooks {
  public:
    void routes(const server_http_context & http, server_routes &) override {
        http.get("/panel", panel);
        http.get("/", panel); // llama.cpp's page has this address already where there is one
    }
};

} // namespace

server_hooks & server_hooks_pages = server_hooks_of<pages_hooks>();
