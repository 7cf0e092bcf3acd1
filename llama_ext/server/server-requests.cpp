// SPDX-License-Identifier: MIT
#include "server-requests.h"

#include "server-common.h"
#include "server-http.h"
#include "stb/stb_image.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace {

constexpr uint64_t MIB = 1 << 20;

// Bytes of memory, as measured: for each byte of a string, each value and each message of a conversation that is read,
// and for each byte of text that is tokenized. A prompt of a request takes some KiB until it is computed.
constexpr uint64_t STRING_BYTE = 3, VALUE = 60, MESSAGE = 3500, TEXT_BYTE = 64;
constexpr uint64_t MEDIA_BYTE = 8; // for each byte of a string that may be an image
constexpr uint64_t PIXEL      = 8; // bytes while an image is decoded; twice that with 16 bits per channel
constexpr uint64_t SAMPLE = 16, SILENCE = 5 * MIB; // for each sample of audio, and for the half minute that is added
constexpr uint64_t MAX_PROMPTS = 256;

constexpr uint64_t SMALL_TEXT = 4 << 10; // counts nothing
constexpr int      KEPT       = MIB;     // bytes that a heap may keep

constexpr uint64_t LARGEST_BODY = 100 * MIB; // the limit of stock
constexpr uint64_t NO_LIMIT     = uint64_t(1) << 60;

using stop_function = std::function<bool()>;

// A share of memory. A small part is not behind a large one that waits.
class share {
  public:
    void set_limit(uint64_t limit) {
        std::lock_guard<std::mutex> lock(mutex_);
        limit_ = limit;
    }

    uint64_t limit() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return limit_;
    }

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
#ifdef __GLIBC__
        if (size > uint64_t(KEPT)) {
            malloc_trim(0); // free pages between others
        }
#endif
        std::lock_guard<std::mutex> lock(mutex_);
        held_ -= size;
        changed_.notify_all();
    }

    mutable std::mutex      mutex_;
    std::condition_variable changed_;
    uint64_t                limit_ = NO_LIMIT; // guarded by mutex_, as held_
    uint64_t                held_  = 0;
};

// No std::exception: handlers would answer with status 400.
struct too_large {
    std::string reason;
};

// Parts of one request never wait for another request's part of the same share, so nobody waits for ever.
share g_bodies, g_trees, g_texts;

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
};

} // namespace

//
// limits
//

void server_requests_plan(common_params & params) {
    static const std::string LIMIT = "hobbit.memory";

#ifdef __GLIBC__
    // where they are not set they grow to many MiB, which the heap of each thread keeps
    mallopt(M_MMAP_THRESHOLD, KEPT);
    mallopt(M_TRIM_THRESHOLD, KEPT);
#endif

    auto &     kvs       = params.kv_overrides;
    const bool has_media = !params.mmproj.path.empty();
    const auto limit     = std::find_if(kvs.begin(), kvs.end(), [](const auto & kv) { return kv.key == LIMIT; });
    const auto memory    = uint64_t(limit == kvs.end() ? 0 : limit->val_i64);
    g_string_byte        = has_media ? MEDIA_BYTE : STRING_BYTE;
    g_planned =
        uint64_t(server_hobbit_default(kvs, "hobbit.requests",
                                       int64_t(hobbit_request_bytes(uint64_t(params.n_ctx), memory, has_media))));
}

uint64_t server_requests_body_limit() {
    return std::min(LARGEST_BODY, g_bodies.limit());
}

//
// reading
//

std::shared_ptr<void> server_requests_hold_body(uint64_t size, const stop_function & should_stop,
                                                std::string & reason) {
    const auto end  = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    auto       held = g_bodies.take(size, [&] { return should_stop() || std::chrono::steady_clock::now() > end; });
    if (!held) {
        reason = "other large requests are being read; ask again";
    }
    return held;
}

// An upper bound on the memory of the tree of a JSON text, and of its copies while it is read.
static uint64_t tree_bytes(const std::string & text) {
    uint64_t n_values = 0, n_chars = 0, n_messages = 0;
    for (size_t i = 0; i < text.size(); i++) {
        const char c = text[i];
        if (c != '"') {
            n_values += c == ',' || c == '[' || c == '{';
            continue;
        }
        n_values++;
        n_messages += text.compare(i, 6, "\"role\"") == 0;
        for (i++; i < text.size() && text[i] != '"'; i++, n_chars++) {
            i += text[i] == '\\';
        }
    }
    return n_values * VALUE + n_chars * g_string_byte + n_messages * MESSAGE;
}

static std::string refusal(const char * what, uint64_t size, uint64_t limit) {
    return string_format("the %s would take %.1f MiB of memory to read, and %.1f MiB are planned for that; shorten it, "
                         "or start the server with a larger --override-kv hobbit.requests=int:BYTES",
                         what, double(size) / MIB, double(limit) / MIB);
}

// Waits for the memory that a text or files take. The reading gives it back.
static void hold(const char * what, uint64_t size) {
    if (!reading::here) {
        return;
    }
    if (size > g_texts.limit()) {
        throw too_large{ refusal(what, size, g_texts.limit()) };
    }
    reading::here->text.reset();
    reading::here->text = g_texts.take(size, reading::here->should_stop);
    if (!reading::here->text) {
        throw std::runtime_error("the client has left");
    }
}

static void hold_text(size_t n_bytes) {
    if (n_bytes > SMALL_TEXT) {
        hold("text", n_bytes * TEXT_BYTE);
    }
}

void server_requests_bound(bool is_bounded) {
    const uint64_t all = is_bounded ? g_planned : NO_LIMIT;
    g_bodies.set_limit(all / 8);
    g_trees.set_limit(all / 2);
    g_texts.set_limit(all / 8 * 3);
    common_before_tokenize = is_bounded ? hold_text : nullptr;
}

void server_requests_hold_media(const mtmd_context * ctx, const std::vector<std::vector<unsigned char>> & files) {
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
    hold("request's images and audio", size);
}

void server_requests_check_prompts(uint64_t n) {
    if (is_bounded() && n > MAX_PROMPTS) {
        throw std::invalid_argument(
            string_format("the request has %zu prompts; send at most %zu at once", size_t(n), size_t(MAX_PROMPTS)));
    }
}

static server_http_res_ptr error_response(const std::string & message, int code) {
    json error    = format_error_response(message, ERROR_TYPE_INVALID_REQUEST);
    error["code"] = code;

    auto response    = std::make_unique<server_http_res>();
    response->status = code;
    response->data   = safe_json_to_str({ { "error", error } });
    return response;
}

server_requests_handler server_requests_bounded(server_requests_handler handler) {
    return [handler = std::move(handler)](const server_http_req & req) {
        server_http_res_ptr response;
        const uint64_t      size = tree_bytes(req.body);
        if (size > g_trees.limit()) {
            return error_response(refusal("request", size, g_trees.limit()), 413);
        }
        auto tree = g_trees.take(size, req.should_stop);
        if (!tree) {
            return error_response("the client has left", 400);
        }
        {
            const reading here(req);
            try {
                response = handler(req);
            } catch (const too_large & e) {
                response = error_response(e.reason, 413);
            }
        }
        if (is_bounded()) { // an answer may take minutes
            std::string().swap(req.body);
            req.held.reset();
        }
        tree.reset();
        if (response->finish) {
            response->finish();
        }
        return response;
    };
}
