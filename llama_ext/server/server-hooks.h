// SPDX-License-Identifier: MIT
#pragma once

// The interface by which llama-server asks and tells us. The patches call these hooks, and each file that has a part in
// the server implements some of them. A hook that no file implements does nothing.
//
// Thread-safety: the thread that computes calls `use` and the hooks of passes. Any thread calls the others; `start`,
// `listen` and `routes` come before all threads.

#include "hobbit.h"
#include "llama-expert-cache.h"

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

class common_json;
struct common_chat_msg;
struct common_chat_parser_params;
struct common_params;
struct common_prompt_checkpoint;
struct mtmd_context;
struct server_http_context;
struct server_http_req;
struct server_http_res;
struct server_routes;
struct server_slot_stats;
struct server_tokens;
struct task_params;

namespace httplib {
class Server;
}

namespace server_schema {
struct field;
}

using server_handler = std::function<std::unique_ptr<server_http_res>(const server_http_req &)>;

// Settings of the expert cache that a request brings.
struct server_task_hobbit {
    std::vector<hobbit_setting> settings;
    bool                        alone = false; // its passes are its own
};

// The precision of a prompt without tokens.
static const hobbit_precision SERVER_NO_TOKENS = hobbit_full_precision();

// A slot between two passes.
struct server_slot_view {
    int32_t id;
    int32_t id_task;    // its request's; -1: it has none
    bool    is_busy;    // it has a request, of which the next fields tell
    bool    is_writing; // it waits for a token in each pass
    bool    is_waiting; // it waits for the prompt that another slot reads
    bool    is_child;   // it has the prompt of another slot
    bool    is_alone;   // its passes are its own
    int32_t n_prompt;   // tokens of the request's prompt
    int32_t n_left;     // its tokens that are to be computed, as far as known
    int32_t n_tokens;   // tokens in its memory, those of the batch included
    int64_t t_last_used;

    const std::list<common_prompt_checkpoint> * checkpoints;
    size_t                                      draft_bytes; // the state before a draft

    const server_slot_stats * stats;

    int32_t n_batch        = 0; // tokens of the batch
    int32_t n_prompt_batch = 0; // its part of a prompt
};

using server_slot_views = std::vector<server_slot_view>;

// The next pass: whose turn it is, and how much it reads of long prompts.
struct server_pass {
    // A prompt with more tokens left is long: the next pass need not read it.
    static constexpr int32_t SHORT_PROMPT = 64;

    int32_t n_batch = 0, n_ubatch = 0; // tokens of a pass and of a graph, at most

    std::vector<int32_t> turns;      // slots that have a turn, in the order in which they read prompts
    int32_t              n_long = 0; // tokens of long prompts that it may still read
    int32_t              n_read = 0; // tokens of long prompts in the batch

    int32_t n_before = -1; // tokens of the batch before the long prompt that is added; -1: none is

    // Tokens that the batch, which has `size`, may have once the slot's prompt has been added.
    template <class Slot>
    int32_t most(const Slot & slot, int32_t size) {
        count(size);
        const bool is_long = slot.can_split() && slot.task->n_tokens() - slot.prompt.n_tokens() > SHORT_PROMPT;
        n_before           = is_long ? size : -1;
        return is_long ? std::min(n_batch, size + n_long) : n_batch;
    }

    // The batch has `size` tokens since that prompt was added.
    void count(int32_t size) {
        if (n_before >= 0) {
            n_long -= size - n_before;
            n_read += size - n_before;
        }
        n_before = -1;
    }
};

class server_hooks {
  public:
    virtual ~server_hooks() = default;

    // A model is to be loaded: what its plan of memory has to know is added.
    virtual void start(common_params &) {}

    // The context of a loaded model; with null the model is about to be freed.
    virtual void use(llama_context *) {}

    // The HTTP server is set up, but for its routes.
    virtual void listen(httplib::Server &, const common_params &) {}

    // Adds routes, and wraps handlers. A router has the route /models/unload.
    virtual void routes(const server_http_context &, server_routes &) {}

    // Wraps a handler, which may throw.
    virtual void wrap(server_handler &) {}

    // Adds fields of a request that asks for text.
    virtual void fields(std::vector<std::unique_ptr<server_schema::field>> &) {}

    // A request that asks for text has been read. Throws std::invalid_argument to refuse it.
    virtual void request(task_params &) {}

    // A prompt or several are to be tokenized, or files are to be decoded. These may wait, and throw.
    virtual void prompt(const common_json &) {}
    virtual void media(const mtmd_context *, const std::vector<std::vector<unsigned char>> &) {}

    virtual void plan_pass(const server_slot_views &, server_pass &) {}
    virtual void before_pass(const server_slot_views &, const server_pass &, int32_t /* n_tokens */) {}
    virtual void after_pass() {}

    // A request is cancelled, perhaps while a pass is computed, or the server ends: who may abort the pass hears of it.
    virtual void left(int32_t /* id_task */) {}
    virtual void end() {}

    // Once per second of a pass: tells the slots whose prompts it reads, with their tokens that are computed.
    virtual void progress(const std::function<void(int32_t, int32_t)> & /* tell */) {}

    // Keeps slots in files when the server ends, and takes them back when it begins: `keep` does so for one.
    using keeper = std::function<void(int32_t, const std::string &)>;
    virtual void keep(llama_context *, const server_slot_views &, bool /* is_end */, const keeper & /* keep */) {}

    // The server has nothing to compute: milliseconds of that after which the model is unloaded; negative: never.
    virtual void idle(int64_t & /* ms */) {}

    // Adds values to the answer of GET /hobbit.
    virtual void values(common_json &) {}
};

// The hooks of a file server-NAME.cpp, which defines server_hooks_NAME by it.
template <typename Hooks>
server_hooks & server_hooks_of() {
    static Hooks hooks;
    return hooks;
}

// The hooks of all files, those of requests first, then in alphabetical order.
const std::vector<server_hooks *> & server_hooks_all();

// Calls one hook of all files.
template <typename... Params, typename... Args>
void server_call(void (server_hooks::*hook)(Params...), Args &&... args) {
    for (server_hooks * each : server_hooks_all()) {
        (each->*hook)(args...);
    }
}

// --- For hooks, and for the patches

// A whole answer in JSON, or with an error of OpenAI's form.
std::unique_ptr<server_http_res> server_answer(const common_json & data, int status = 200);
std::unique_ptr<server_http_res> server_refusal(const std::string & message, int status);

// FNV-1a, 64 bits, of further bytes.
inline uint64_t server_hash(const std::string & bytes, uint64_t hash = 14695981039346656037u) {
    for (const char c : bytes) {
        hash = (hash ^ uint8_t(c)) * 1099511628211u;
    }
    return hash;
}

// The value of an override, or `value` where none is given. One of another type is refused when the model is opened.
int64_t server_override(const common_params & params, const std::string & key, int64_t value);

// Adds an override where none is given.
void server_add_override(common_params & params, const std::string & key, int64_t value);

// The precision of what the sequence computes next, or for -1 a request without settings; without a cache all high.
hobbit_precision server_precision(const llama_context * ctx, llama_seq_id seq_id = -1);

// Reads an answer. One whose form the parser refuses is kept as text, behind what was read before.
common_chat_msg server_parse_chat(const common_chat_msg & before, const std::string & text, bool is_partial,
                                  const common_chat_parser_params & params);

// Writes a file as llama_state_seq_save_file does. An earlier file stays until the new one is whole. Throws
// std::runtime_error, which tells why.
size_t server_save_slot(llama_context * ctx, const char * path, llama_seq_id seq_id, const llama_token * tokens,
                        size_t n_tokens);

// Threads of connections beside the first ones, at most. `listen` sets it.
inline int server_threads = 0;

// --- Functions of single files, for the thread that computes.

// May a request with so many tokens begin beside others? n_children: further slots that it takes.  n_cells: cells that
// all slots share; 0: they share none
bool server_may_begin(const server_slot_views & slots, int32_t id_task, int32_t n_tokens, int32_t n_children,
                      int32_t n_cells);

// Waits the request since long for slots, before all others?
bool server_is_overdue(int32_t id_task);

// The slots have used up n_cells that they share: whose answer ends? -1: nobody's.
int32_t server_longest_answer(const server_slot_views & slots, int32_t n_cells);

// Gives a slot's sequence the settings that its request brings. Returns why it is refused; "": it is not.
std::string server_begin_settings(const llama_context * ctx, int32_t id_slot, const server_task_hobbit & asked,
                                  bool shares_cells);

// A slot wants to keep a checkpoint of that size: which slot must give its oldest one first? -1: none, and `fits` tells
// whether it may be kept.
int32_t server_checkpoint_victim(const server_slot_views & slots, int32_t id_slot, size_t size, bool & fits);

// --- Functions of server-report.cpp and server-requests.cpp, for other hooks. Any thread may call them.

// A model was loaded or a computation failed: why it cannot be used, or what is `known`.
std::string server_report_failure(const llama_context * ctx, const std::string & known = "");

// A signal asks the server to end: its handler calls this.
void server_report_interrupt(int signal);

// A task has come; is_work: the model is needed for it. Returns that.
bool server_report_work(bool is_work);

// Has the model an expert cache?
bool server_report_is_cached();

// Bytes that the checkpoints of all slots may take; without an expert cache no bound.
uint64_t server_report_checkpoint_bytes();

// Layers that were computed, and those of a graph that the cache computes; 0 without an expert cache.
std::pair<double, int32_t> server_report_layers();

// Waits for the memory of `n` answers to each text of the request that this thread reads, which its response holds from
// then on: `size`, and that of `copied`, JSON. Answers that could never fit are refused; the error begins with `what`.
// Without a bound on requests this does nothing.
void server_requests_hold_answers(int32_t n, uint64_t size, const std::string & copied, const std::string & what);
// Waits so for texts that are embedded, for those that are ranked, before they are tokenized, and for tokens that are
// told as text.
void server_requests_hold_vectors(const llama_model * model, enum llama_pooling_type pooling,
                                  const std::vector<server_tokens> & texts);
void server_requests_hold_ranks(const std::string & query, const std::vector<std::string> & texts);
void server_requests_hold_tokens(const llama_vocab * vocab, const std::vector<llama_token> & tokens);
