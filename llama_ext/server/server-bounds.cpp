// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-task.h"

#include <algorithm>
#include <atomic>
#include <set>
#include <stdexcept>

// Bounds on the numbers, lists and texts of a request that asks for text: what they make the server allocate or compute
// keeps to the context, to the vocabulary, or to the request's share of memory. Without an expert cache nothing is
// bounded but what would end the process. tests/server/test_server_bounds.py has a row for each field.

namespace {

constexpr size_t MAX_BREAKERS = 32, MAX_BREAKER = 40;            // each is compared with the whole vocabulary
constexpr size_t MAX_TRIGGER = 8192;                             // std::regex calls itself for each part of a pattern
constexpr size_t PROBABILITY = 1400, PARSER = 300, GRAMMAR = 24; // bytes of a token, a parser's part, a grammar's byte

class bounds_hooks : public server_hooks {
  public:
    void use(llama_context * ctx) override {
        if (ctx) {
            n_ctx_   = int32_t(llama_n_ctx_seq(ctx));
            n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
        }
    }

    void request(task_params & params) override {
        // std::regex may never end with a pattern of a client; chat templates have their own
        const bool is_raw =
            params.res_type == TASK_RESPONSE_TYPE_NONE || params.res_type == TASK_RESPONSE_TYPE_OAI_CMPL;
        const auto last = is_raw ? COMMON_GRAMMAR_TRIGGER_TYPE_WORD : COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL;
        for (const auto & trigger : params.sampling.grammar_triggers) {
            if (trigger.type < COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN || trigger.type > last) {
                throw std::invalid_argument(string_format("a request has no trigger of type %d", int(trigger.type)));
            }
            if (trigger.value.size() > MAX_TRIGGER) {
                throw std::invalid_argument(string_format("a trigger may have %zu bytes", MAX_TRIGGER));
            }
        }
        if (server_report_is_cached()) {
            bound(params);
        }
    }

  private:
    void bound(task_params & params) const {
        auto & sampling = params.sampling;

        // a window has a place for each of its tokens, and no more than the context can fill
        sampling.penalty_last_n     = std::min<int32_t>(sampling.penalty_last_n, n_ctx_);
        sampling.dry_penalty_last_n = std::min<int32_t>(sampling.dry_penalty_last_n, n_ctx_);

        std::set<common_sampler_type> seen;
        const auto                    is_again = [&](common_sampler_type type) { return !seen.insert(type).second; };
        sampling.samplers.erase(std::remove_if(sampling.samplers.begin(), sampling.samplers.end(), is_again),
                                sampling.samplers.end());

        const auto & breakers = sampling.dry_sequence_breakers;
        const bool   is_long =
            std::any_of(breakers.begin(), breakers.end(), [](auto & b) { return b.size() > MAX_BREAKER; });
        if (is_long || breakers.size() > MAX_BREAKERS) {
            throw std::invalid_argument(
                string_format("dry_sequence_breakers may have %zu texts of %zu bytes", MAX_BREAKERS, MAX_BREAKER));
        }
        // a stream's tokens leave as they come
        const int32_t n_ctx    = n_ctx_;
        const int32_t n_most   = params.n_predict < 0 ? n_ctx : std::min(params.n_predict, n_ctx);
        const int32_t n_tokens = params.stream ? 1 : n_most;
        const int32_t n_probs  = std::min<int32_t>(std::max(sampling.n_probs, 0), n_vocab_);
        const auto    probs    = uint64_t(n_probs) * n_tokens * PROBABILITY;
        const auto size = params.chat_parser_params.parser.size() * PARSER + sampling.grammar.grammar.size() * GRAMMAR +
                          sampling.logit_bias.size() * sizeof(llama_logit_bias);
        const auto copied = safe_json_to_str({ { "own", params.to_json() }, { "fields", params.response_fields } });
        server_requests_hold_answers(std::max(params.n_cmpl, 1), size + probs, copied,
                                     string_format("%d probabilities for each of %d tokens, and the request's fields,",
                                                   n_probs, n_tokens));
    }

    std::atomic<int32_t> n_ctx_{ 0 }, n_vocab_{ 0 }; // tokens of a slot and of the vocabulary
};

} // namespace

server_hooks & server_hooks_bounds = server_hooks_of<bounds_hooks>();
