// SPDX-License-Identifier: MIT
#pragma once

// llama-server's interface to the expert cache: reports and requests. Without an expert cache these functions have no
// effect. Any thread may call the functions that take no context.

#include "hobbit.h"
#include "llama.h"
#include "server-passes.h"
#include "server-requests.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

class common_json;
struct common_params;
struct server_http_req;
struct server_http_res;

//
// Counters and failures
//

// Reports on the cache of this context's model from now on. With null the model can be freed: its last counters are
// kept until another one is loaded.
void server_hobbit_use(const llama_context * ctx);

// Answers GET /hobbit: sizes and counters as JSON, named as in hobbit.h.
std::unique_ptr<server_http_res> server_hobbit_get(const server_http_req & req);

// Sizes and counters as Prometheus text; "" without an expert cache.
std::string server_hobbit_metrics();

// Answers GET /metrics by `get`, which waits for the computation; while the disk does not answer, by the cache alone.
server_requests_handler server_hobbit_while_waiting(server_requests_handler get);

// Layers that were computed, and those of a graph that the cache computes; 0 without an expert cache.
std::pair<double, int32_t> server_hobbit_layers();

// Experts that layers found in memory, and those that they needed, since the model was loaded.
std::pair<double, double> server_hobbit_uses();

// Asks the cache why it computes nothing any more; "" where it computes.
std::string server_hobbit_check(const llama_context * ctx);

// Tells the socket HOBBIT_BUSY_SOCKET, where there is one, that the server has something to compute, or nothing.
void server_hobbit_say_busy(bool is_busy);

// The last answer without the folders of files, as everybody may read it, or that the disk does not answer. Waits for
// no computation.
std::string server_hobbit_failure();

//
// Checkpoints of contexts
//

// The value of an override, which is added where it is not given.
int64_t server_hobbit_default(std::vector<llama_model_kv_override> & kvs, const std::string & key, int64_t value);

// Lets the model's plan of memory leave room for the checkpoints of all slots, as far as it reaches; for the states
// before drafts in any case. An override of hobbit.least_snapshots asks for more. REQUIRES: before the model is loaded
void server_hobbit_plan_checkpoints(common_params & params);

// Bytes that the checkpoints of all slots may take; without an expert cache no bound. REQUIRES: the model is loaded
uint64_t server_hobbit_checkpoint_bytes();

//
// Settings of a request
//

// The precision of a prompt without tokens.
static constexpr hobbit_precision SERVER_HOBBIT_NO_TOKENS = { 1.0, 1.0, 0.0 };

// Describes the field of a request that server_hobbit_parse reads. Valid for ever.
const char * server_hobbit_help();

// Reads live settings like {"t1": 0.6, "t2": 0.9}, and alone: the request has its passes for itself. Throws
// std::invalid_argument.
std::vector<hobbit_setting> server_hobbit_parse(const common_json & data, bool & alone);

// The settings of a model's name: high precision alone where it ends with -exact, else none.
std::vector<hobbit_setting> server_hobbit_of_name(const common_json & name);

// Throws std::invalid_argument for triggers of a grammar that would end the process: unknown types, and patterns so
// long that std::regex, which calls itself for each part of one, has no stack left.
void server_hobbit_check_triggers(const common_json & triggers);

// Throws std::invalid_argument for a prompt, or one of several, that has more bytes than n_ctx tokens can spell, and
// for too many prompts. Without an expert cache nothing is refused.
void server_hobbit_check_prompt(const llama_vocab * vocab, const common_json & prompt, int32_t n_ctx);

// Begins a sequence of the cache for a request with these settings. Returns why they are refused, or "".
std::string server_hobbit_begin(llama_context * ctx, llama_seq_id seq_id, const std::vector<hobbit_setting> & changes);

// The precision of what the sequence computes next; -1: of a request without settings. Without an expert cache all
// high.
hobbit_precision server_hobbit_precision(const llama_context * ctx, llama_seq_id seq_id = -1);
