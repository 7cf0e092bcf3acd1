// SPDX-License-Identifier: MIT
// Answers GET /hits with the experts that each layer found in the cache.
#include "llama-expert-cache.h"
#include "server-common.h"
#include "server-context.h"
#include "server-hooks.h"
#include "server-http.h"

namespace {

class hits_hooks : public server_hooks {
  public:
    void use(llama_context * ctx) override { model_ = ctx ? llama_model_expert_cache(llama_get_model(ctx)) : nullptr; }

    void routes(const server_http_context & http, server_routes &) override {
        http.get("/hits", [this](const server_http_req &) {
            hobbit_info info = {};
            hobbit_get_info(model_, &info);
            std::vector<uint64_t> hits(info.n_layers), misses(info.n_layers);
            hobbit_get_layer_uses(model_, hits.data(), misses.data(), hits.size());
            return server_answer({ { "hits", hits } });
        });
    }

  private:
    hobbit_model * model_ = nullptr;
};

} // namespace

server_hooks & server_hooks_hits = server_hooks_of<hits_hooks>();
