// SPDX-License-Identifier: MIT
#pragma once

// What llama-server reports about the expert cache and asks of it. Without an expert cache these functions have no
// effect. Any thread may call the functions that take no context.

#include "hobbit.h"
#include "llama.h"

#include <cmath>
#include <functional>
#include <memory>
#include <string>

class common_json;
struct server_http_req;
struct server_http_res;

//
// Counters and failures
//

// Reports on the cache of this context's model from now on. With null the model can be freed: its last counters are
// kept until another one is loaded.
// has_media: the model takes images or sound, whose bodies may have any size.
void server_hobbit_use(const llama_context * ctx, bool has_media = false);

// Answers GET /hobbit: sizes and counters as JSON, named as in hobbit.h.
std::unique_ptr<server_http_res> server_hobbit_get(const server_http_req & req);

// The same as Prometheus text; "" without an expert cache.
std::string server_hobbit_metrics();

// Answers GET /metrics by `get`, which waits for the computation; while the disk does not answer, by the cache alone.
std::function<std::unique_ptr<server_http_res>(const server_http_req &)>
server_hobbit_while_waiting(std::function<std::unique_ptr<server_http_res>(const server_http_req &)> get);

// Asks the cache why it computes nothing any more; "" where it computes.
std::string server_hobbit_check(const llama_context * ctx);

// The last answer without the folders of files, as everybody may read it, or that the disk does not answer. Waits for
// no computation.
std::string server_hobbit_failure();

//
// Thresholds of a request
//

// Of a request, NAN stands for the server's own; of a computed prompt, for a prompt without tokens.
struct server_hobbit_thresholds {
    double t1         = NAN;
    double t2         = NAN;
    double price      = NAN;
    double confidence = NAN; // of an answer; it does not count for what is computed, since kept tokens are drafts

    bool given() const { return !std::isnan(t1) || !std::isnan(t2) || !std::isnan(price) || !std::isnan(confidence); }

    // Whether tokens computed with these thresholds have the precision that `others` ask for, or better.
    bool cover(const server_hobbit_thresholds & others) const {
        return !(t1 < others.t1) && !(t2 < others.t2) && !(price > others.price);
    }

    void lower(const server_hobbit_thresholds & others) {
        t1    = std::fmin(t1, others.t1);
        t2    = std::fmin(t2, others.t2);
        price = std::fmax(price, others.price);
    }
};

// Reads {"t1": ..., "t2": ..., "confidence": ...} or the like; throws std::invalid_argument.
server_hobbit_thresholds server_hobbit_parse(const common_json & data);

// Throws std::invalid_argument for triggers of a grammar that would end the process: unknown types, and patterns so
// long that std::regex, which calls itself for each part of one, has no stack left.
void server_hobbit_check_triggers(const common_json & triggers);

// The error for a request whose body is too long for any text that fits into the context, as JSON; "" for others, and
// without an expert cache, which bounds the memory of the process.
std::string server_hobbit_check_body(const std::string & content_length);

// The bytes that such a body may have. REQUIRES: the model is loaded
uint64_t server_hobbit_body_limit();

// Wraps a handler. Reading a body as JSON takes many times its bytes. So with an expert cache the bodies that are being
// answered have 2 MiB together, or are a single larger one: others wait, and come in their order. Small ones do not
// count. A body that is no JSON throws std::invalid_argument, and a client that leaves while it waits
// std::runtime_error.
std::function<std::unique_ptr<server_http_res>(const server_http_req &)>
server_hobbit_bounded(std::function<std::unique_ptr<server_http_res>(const server_http_req &)> handler);

// Throws std::invalid_argument for a prompt, or one of several, that has more bytes than n_ctx tokens can spell:
// tokenizing it would take many times its size. Without an expert cache nothing is refused.
void server_hobbit_check_prompt(const llama_vocab * vocab, const common_json & prompt, int32_t n_ctx);

// Replaces NAN by the server's own number, moved where t1 would be above t2. Unchanged without an expert cache.
server_hobbit_thresholds server_hobbit_effective(const llama_context * ctx, server_hobbit_thresholds thresholds);

// Begins a sequence of the cache for a request; `given` tells whether the request has thresholds. Returns what is wrong
// with them, or "".
std::string server_hobbit_begin(llama_context * ctx, llama_seq_id seq_id, server_hobbit_thresholds effective,
                                bool given);
