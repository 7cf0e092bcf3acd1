// SPDX-License-Identifier: MIT
#include "server-hooks.h"

#include "server-common.h"
#include "server-http.h"
#include "stb/stb_image.h"

#include <cpp-httplib/httplib.h>
#include <malloc.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <regex>

// Patches add a hook with a text's size, and the samples that an audio file says that it has at the model's rate, or 0.
extern void (*common_before_tokenize)(size_t n_bytes);
uint64_t mtmd_helper_n_samples(const mtmd_context * ctx, const unsigned char * buf, size_t len);

// The memory of requests. With an expert cache all of them together keep to hobbit.requests: they wait for each other,
// and what could never fit is refused.

namespace {

constexpr uint64_t MIB = 1 << 20;

// Bytes of memory, as measured: for each byte of a string, each value and each message of a conversation that is read,
// and for each byte of text that is tokenized. A prompt of a request takes some KiB until it is computed.
constexpr uint64_t STRING_BYTE = 3, VALUE = 60, MESSAGE = 3500, TEXT_BYTE = 64;
constexpr uint64_t MEDIA_BYTE = 8; // for each byte of a string that may be an image
constexpr uint64_t PIXEL      = 8; // bytes while an image is decoded; twice that with 16 bits per channel
constexpr uint64_t SAMPLE = 16, SILENCE = 5 * MIB; // for each sample of audio, and for the half minute that is added
constexpr uint64_t MAX_PROMPTS = 256, MAX_LOOKS = 8 * MIB;
// for each text that is embedded or ranked, number of a vector, token that is told as text, and byte of that
constexpr uint64_t TASK = 8 << 10, NUMBER = 64, TOKEN = 300, SPELT_BYTE = 16;

constexpr uint64_t SMALL_TEXT = 4 << 10, SMALL_ANSWER = 16 << 10; // they count nothing
constexpr int      KEPT = MIB;                                    // bytes that a heap may keep

constexpr const char * FOREIGN_PAGE = "this server answers pages and names of this machine alone: start it with "
                                      "--api-key KEY, or --cors-origins '*' to answer every page";

constexpr uint64_t LARGEST_BODY = 100 * MIB; // the limit of stock
constexpr uint64_t NGRAM_TABLE  = 16 * MIB;  // bytes of common_ngram_mod
constexpr uint64_t CONNECTION   = 128 << 10; // bytes of a thread, its headers, and the kernel's part
constexpr uint64_t NO_LIMIT     = uint64_t(1) << 60;

bool g_is_router = false; // it starts servers of models

using stop_function = std::function<bool()>;

// A share of memory. A small part is not behind a large one that waits.
class share {
  public:
    void set_limit(uint64_t limit) { limit_ = limit; }

    uint64_t limit() const { return limit_; }

    // The part, or null where should_stop says so. REQUIRES: size <= limit()
    std::shared_ptr<void> take(uint64_t size, const stop_function & should_stop) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!changed_.wait_for(lock, std::chrono::milliseconds(200), [&] { return held_ + size <= limit_; })) {
            if (should_stop()) {
                return nullptr;
            }
        }
        held_ += size;
        return std::shared_ptr<void>(this, [this, size](void *) { give_back(size); });
    }

  private:
    void give_back(uint64_t size) {
        if (size > uint64_t(KEPT)) {
            malloc_trim(0); // free pages between others
        }
        std::lock_guard<std::mutex> lock(mutex_);
        held_ -= size;
        changed_.notify_all();
    }

    std::mutex              mutex_;
    std::condition_variable changed_;
    std::atomic<uint64_t>   limit_ = NO_LIMIT;
    uint64_t                held_  = 0; // guarded by mutex_
};

// No std::exception: handlers would answer with status 400.
struct too_large {
    std::string reason;
};

// Parts of one request never wait for another request's part of the same share, so nobody waits for ever.
share g_bodies, g_trees, g_texts; // the last also of answers

uint64_t g_planned = 0, g_string_byte = 0; // written before the model is loaded

bool is_bounded() {
    return g_bodies.limit() < NO_LIMIT / 8;
}

// The request that this thread reads.
class reading {
  public:
    explicit reading(const server_http_req & req) : should_stop(req.should_stop) { here = this; }

    ~reading() { here = nullptr; }

    static inline thread_local reading * here = nullptr;

    const stop_function & should_stop;
    std::shared_ptr<void> text; // while it is tokenized, or images and audio while they are decoded
    std::shared_ptr<void> answer;
    bool                  has_text  = false; // the answer's memory has room for it
    uint64_t              n_prompts = 1;
};

// The memory of a body, until it has been parsed or its connection is done with.
struct body {
    std::shared_ptr<void> held, counted = all;

    static inline thread_local std::weak_ptr<body> here; // the one that this thread has received
    static inline const std::shared_ptr<void>      all = std::make_shared<int>(); // each that lives has it
};

// Counts what the tree of a JSON text takes, as its parser will see it: names and texts without their escapes.
class tree_counter {
  public:
    uint64_t bytes() const { return n_values_ * VALUE + n_chars_ * g_string_byte + n_messages_ * MESSAGE; }

    uint64_t n_looks = 0; // each name of an object is compared with those before it

    bool null() { return value(); }
    bool boolean(bool) { return value(); }
    bool number_integer(int64_t) { return value(); }
    bool number_unsigned(uint64_t) { return value(); }
    bool number_float(double, const std::string &) { return value(); }
    bool start_object(size_t) { return n_names_.push_back(0), value(); }
    bool end_object() { return n_names_.pop_back(), true; }
    bool start_array(size_t) { return value(); }
    bool end_array() { return true; }
    bool binary(const nlohmann::json::binary_t &) { return false; }

    bool string(const std::string & text) {
        n_chars_ += text.size();
        return value();
    }

    bool key(const std::string & name) {
        n_looks     += n_names_.back()++;
        n_messages_ += name == "role" || name == "function";
        return string(name);
    }

    // the handler's own parser says what is wrong
    bool parse_error(size_t, const std::string &, const nlohmann::json::exception &) { return false; }

  private:
    bool value() {
        n_values_++;
        return true;
    }

    uint64_t n_values_ = 0, n_chars_ = 0, n_messages_ = 0;

    std::vector<uint64_t> n_names_; // names of each object that has begun
};

// Bounds on the memory of the tree of a JSON text, and of its copies while it is read, and on the names looked at.
tree_counter count_tree(const std::string & text) {
    tree_counter counter;
    nlohmann::json::sax_parse(text, &counter);
    return counter;
}

std::string refusal(const char * what, uint64_t size, const char * for_what, uint64_t limit) {
    return string_format("%s would take %.1f MiB of memory%s, and %.1f MiB are planned for that; shorten it, "
                         "or start the server with a larger --override-kv hobbit.requests=int:BYTES",
                         what, double(size) / MIB, for_what, double(limit) / MIB);
}

// Waits for the memory that a text or files take. The reading gives it back.
void hold(const char * what, uint64_t size) {
    if (!reading::here) {
        return;
    }
    if (size > g_texts.limit()) {
        throw too_large{ refusal(what, size, " to read", g_texts.limit()) };
    }
    reading::here->text.reset();
    reading::here->answer.reset(); // nobody waits for a part of a share while he holds another
    reading::here->text = g_texts.take(size, reading::here->should_stop);
    if (!reading::here->text) {
        throw std::runtime_error("the client has left");
    }
}

void hold_text(size_t n_bytes) {
    if (n_bytes > SMALL_TEXT && !(reading::here && reading::here->has_text)) {
        hold("the text", n_bytes * TEXT_BYTE);
    }
}

uint64_t body_limit() {
    return std::min(LARGEST_BODY, g_bodies.limit());
}

httplib::Server::HandlerResponse refuse(httplib::Response & res, const char * reason, int status) {
    const auto answer = server_refusal(reason, status);
    res.status        = status;
    res.set_content(answer->data, answer->content_type);
    return httplib::Server::HandlerResponse::Handled;
}

// Waits for the memory of a body before it is received, and refuses one that could never fit.
httplib::Server::HandlerResponse receive(const httplib::Request & req, httplib::Response & res) {
    const uint64_t limit   = body_limit();
    const bool     chunked = req.has_header("Transfer-Encoding");
    const uint64_t size    = chunked ? limit : req.get_header_value_u64("Content-Length");
    if (size > limit) {
        return httplib::Server::HandlerResponse::Unhandled; // refused before it is received
    }
    if (req.method == "POST" && body::all.use_count() > server_threads) { // the first ones are for /health
        return refuse(res, "this server has too many requests at once; ask again", 503);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    auto       own = std::make_shared<body>();
    own->held =
        g_bodies.take(size, [&] { return req.is_connection_closed() || std::chrono::steady_clock::now() > end; });
    if (!own->held) {
        return refuse(res, "other large requests are being read; ask again", 503);
    }
    const_cast<httplib::Request &>(req).body.reserve(chunked ? 0 : size); // else it doubles
    body::here = own;
    res.user_data.set("body", std::move(own));
    return httplib::Server::HandlerResponse::Unhandled;
}

// A response that holds the memory of the answer until it has been sent.
void attach(server_http_res & response, std::shared_ptr<void> answer) {
    const auto finish = response.finish ? std::move(response.finish) : [] {};
    response.finish   = [finish, answer] { finish(); };
}

// Answers a route that nobody has, and a body that is too large.
void answer_error(bool is_ollama, httplib::Response & res) {
    if (!res.body.empty() || (res.status != 404 && res.status != 413)) {
        return;
    }
    const bool is_large = res.status == 413;
    const auto limit    = std::to_string(body_limit());
    json       error    = is_large ? format_error_response("the request has more than " + limit +
                                                               " bytes, for which this server has no memory",
                                                           ERROR_TYPE_INVALID_REQUEST)
                                   : format_error_response("File Not Found", ERROR_TYPE_NOT_FOUND);
    error["code"]       = res.status;
    res.set_content(safe_json_to_str({ { "error", is_ollama ? error.at("message") : error } }),
                    "application/json; charset=utf-8");
}

// May it ask? A page tells its site as Origin. A server that only this machine reaches has no other name as Host: a
// foreign site may give its own name this machine's address.
bool is_trusted(const httplib::Request & req, const common_params & params) {
    static const std::regex here("(https?://)?(localhost|127\\.0\\.0\\.1|\\[?::1\\]?)(:[0-9]+)?");
    static const std::regex address("([0-9.]+|\\[[0-9a-f:.]+\\])(:[0-9]+)?");

    const std::string host    = req.get_header_value("Host").substr(0, 256);
    const std::string page    = req.get_header_value("Origin").substr(0, 256);
    const auto &      names   = params.hostnames;
    const auto        is_here = [&](const std::string & name) { return std::regex_match(name, here); };
    return params.cors_origins != "localhost" || !params.api_keys.empty() || std::getenv("LLAMA_SERVER_ROUTER_PORT") ||
           ((page.empty() || is_here(page) || page == "http://" + host || page == "https://" + host) &&
            (host.empty() || is_here(host) || std::regex_match(host, address) ||
             !std::all_of(names.begin(), names.end(), is_here)));
}

class requests_hooks : public server_hooks {
  public:
    void start(common_params & params) override {
        server_add_override(params, "hobbit.requests", int64_t(plan(params)));
    }

    // Requests are bounded where the model has an expert cache.
    void use(llama_context * ctx) override {
        if (!ctx) {
            return;
        }
        const bool     is_bounded = llama_model_expert_cache(llama_get_model(ctx));
        const uint64_t all        = is_bounded ? g_planned : NO_LIMIT;
        g_bodies.set_limit(all / 8);
        g_trees.set_limit(all / 2);
        g_texts.set_limit(all / 8 * 3);
        common_before_tokenize = is_bounded ? hold_text : [](size_t) {};
    }

    void listen(httplib::Server & server, const common_params & params) override {
        g_is_router = params.model.path.empty();
        plan(params);
        // a body that stops in the middle holds memory that others wait for
        server.set_read_timeout(std::min(params.timeout_read, 10));
        server.set_write_timeout(std::min(params.timeout_write, 30)); // as an answer that nobody reads
        server.set_error_handler([api = params.api_prefix + "/api/"](const auto & req, auto & res) {
            answer_error(string_starts_with(req.path, api), res);
        });
        server.set_pre_request_handler(
            [&server, &params, is_loaded = std::make_shared<std::once_flag>()](const auto & req, auto & res) {
                std::call_once(*is_loaded, [&] { server.set_payload_max_length(body_limit()); }); // the model is
                return is_trusted(req, params) ? receive(req, res) : refuse(res, FOREIGN_PAGE, 403);
            });
    }

    void wrap(server_handler & handler) override {
        handler = [inner = std::move(handler)](const server_http_req & req) {
            std::unique_ptr<server_http_res> response;
            const tree_counter               count = count_tree(req.body);
            const uint64_t                   size  = count.bytes();
            if (count.n_looks > MAX_LOOKS) {
                return server_refusal("the request's objects have too many names: one may have 4000, many fewer", 400);
            }
            if (size > g_trees.limit()) {
                return server_refusal(refusal("the request", size, " to read", g_trees.limit()), 413);
            }
            auto tree = g_trees.take(size, req.should_stop);
            if (!tree) {
                return server_refusal("the client has left", 400);
            }
            {
                reading here(req);
                try {
                    response = inner(req);
                    attach(*response, std::move(here.answer));
                } catch (const too_large & e) {
                    response = server_refusal(e.reason, 413);
                } catch (const std::out_of_range &) {
                    throw std::invalid_argument("the request names a token that the model does not have");
                } catch (const std::bad_alloc &) {
                    throw;
                } catch (const std::exception & e) {
                    if (g_is_router && !dynamic_cast<const common_json_error *>(&e)) { // a model that it cannot start
                        throw;
                    }
                    throw std::invalid_argument(e.what()); // as a template that refuses the messages
                }
            }
            if (is_bounded()) { // an answer may take minutes
                std::string().swap(const_cast<server_http_req &>(req).body);
                if (const auto own = body::here.lock()) {
                    own->held.reset();
                }
            }
            attach(*response, response->data.size() > SMALL_ANSWER ? tree : nullptr); // its client may read slowly
            tree.reset();
            if (response->finish) {
                response->finish();
            }
            return response;
        };
    }

    // Throws for too many prompts.
    void prompt(const json & prompt) override {
        if (!prompt.is_array() || prompt.empty() || prompt.at(0).is_number()) { // one
            return;
        }
        if (is_bounded() && prompt.size() > MAX_PROMPTS) {
            throw std::invalid_argument(string_format("the request has %zu prompts; send at most %zu at once",
                                                      prompt.size(), size_t(MAX_PROMPTS)));
        }
        if (reading::here) {
            reading::here->n_prompts = std::max<uint64_t>(reading::here->n_prompts, prompt.size());
        }
    }

    // Waits for the memory of images' pixels and audio's samples, by what the files announce.
    void media(const mtmd_context * ctx, const std::vector<std::vector<unsigned char>> & files) override {
        uint64_t size = 0;
        for (const auto & file : files) {
            int        width = 0, height = 0, n_channels = 0;
            const auto n_samples = mtmd_helper_n_samples(ctx, file.data(), file.size());
            if (n_samples > 0) {
                size += n_samples * SAMPLE + SILENCE;
            } else if (stbi_info_from_memory(file.data(), int(file.size()), &width, &height, &n_channels)) {
                size += uint64_t(width) * height * PIXEL << stbi_is_16_bit_from_memory(file.data(), int(file.size()));
            }
            size = std::min(size, NO_LIMIT); // many that announce far too much
        }
        hold("the request's images and audio", size);
    }

  private:
    // Sets what is to be known before the model is loaded. Returns the memory of requests, with tables.
    static uint64_t plan(const common_params & params) {
        // where they are not set they grow to many MiB, which the heap of each thread keeps
        mallopt(M_MMAP_THRESHOLD, KEPT);
        mallopt(M_TRIM_THRESHOLD, KEPT);
        const bool has_media = !params.mmproj.path.empty();
        const auto memory    = uint64_t(server_override(params, "hobbit.memory", 0));
        g_string_byte        = has_media ? MEDIA_BYTE : STRING_BYTE;

        // drafts by n-grams have a table beside all requests
        const auto & drafts  = params.speculative.types;
        const bool   has     = std::count(drafts.begin(), drafts.end(), COMMON_SPECULATIVE_TYPE_NGRAM_MOD) > 0;
        const auto   table   = has ? NGRAM_TABLE : 0;
        const auto   wanted  = hobbit_request_bytes(uint64_t(params.n_ctx), memory, has_media) + table;
        const auto   planned = uint64_t(server_override(params, "hobbit.requests", int64_t(wanted)));
        g_planned            = (planned - std::min(table, planned / 2)) / 3 * 2;
        server_threads       = memory == 0 ? 1024 : int(std::clamp<uint64_t>(g_planned / 2 / CONNECTION, 8, 1024));
        return planned;
    }
};

} // namespace

void server_requests_hold_answers(int32_t n, uint64_t size, const std::string & copied, const std::string & what) {
    const uint64_t all = reading::here ? reading::here->n_prompts * n * (size + count_tree(copied).bytes()) : 0;
    if (all < SMALL_ANSWER || !is_bounded()) {
        return;
    }
    if (all > g_texts.limit()) {
        throw too_large{ refusal(what.c_str(), all, "", g_texts.limit()) };
    }
    reading::here->text.reset(); // it is tokenized
    if (!reading::here->answer && !(reading::here->answer = g_texts.take(all, reading::here->should_stop))) {
        throw std::runtime_error("the client has left");
    }
}

static void hold_numbers(size_t n_texts, size_t n_numbers) {
    server_requests_hold_answers(1, n_texts * TASK + n_numbers * NUMBER, "",
                                 string_format("%zu texts and %zu numbers of vectors", n_texts, n_numbers));
}

void server_requests_hold_vectors(const llama_model * model, enum llama_pooling_type pooling,
                                  const std::vector<server_tokens> & texts) {
    size_t n_vectors = 0;
    for (const auto & text : texts) {
        n_vectors += pooling == LLAMA_POOLING_TYPE_NONE ? text.size() : 1;
    }
    hold_numbers(texts.size(), n_vectors * llama_model_n_embd_out(model));
}

void server_requests_hold_ranks(const std::string & query, const std::vector<std::string> & texts) {
    size_t n_bytes = 0, longest = 0;
    for (const auto & text : texts) {
        n_bytes += text.size() + query.size();
        longest  = std::max(longest, text.size() + query.size());
    }
    hold_numbers(texts.size(), n_bytes / 8 + longest); // a token of a byte takes 8, and tokenizing one 64
    if (reading::here) {
        reading::here->has_text = true;
    }
}

void server_requests_hold_tokens(const llama_vocab * vocab, const std::vector<llama_token> & tokens) {
    uint64_t size = tokens.size() * TOKEN;
    for (const llama_token token : tokens) {
        size += std::strlen(llama_vocab_get_text(vocab, token)) * SPELT_BYTE;
    }
    server_requests_hold_answers(1, size, "", string_format("%zu tokens as text", tokens.size()));
}

server_hooks & server_hooks_requests = server_hooks_of<requests_hooks>();
