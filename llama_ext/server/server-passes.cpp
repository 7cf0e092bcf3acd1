// SPDX-License-Identifier: MIT
#include "server-passes.h"

#include "server-common.h"

#include <algorithm>
#include <mutex>

namespace {

constexpr double  STALL_S    = 4.0; // that all who wait for tokens may wait together for a part of a long prompt
constexpr int32_t LEAST      = 512; // with fewer tokens a pass reads nearly as many experts
constexpr int32_t MIN_TOKENS = 20;  // a pause in so many tokens is not among their usual 95 %

double seconds() {
    return double(ggml_time_us()) / 1e6;
}

// The last pass over long prompts, and what those who wait have had since. The thread that computes alone has it.
struct {
    double  pause     = 0.0; // seconds that others waited for it
    double  per_s     = 0.0; // tokens
    double  had       = 0.0; // seconds
    int32_t n_had     = 0;   // tokens each
    int32_t n_long    = 0;   // in the pass that is computed, as n_waiting
    int32_t n_waiting = 0;
} g_last;

// The pass that is computed.
struct {
    std::mutex                        mutex;
    std::vector<server_passes_prompt> prompts;
    double                            start    = 0.0; // seconds()
    double                            n_before = 0.0; // layers
    double                            n_layers = 0.0; // layers of the whole pass
} g_pass;

} // namespace

int32_t server_passes_tokens(int32_t n_waiting, int32_t n_most) {
    if (n_waiting == 0) {
        return n_most;
    }
    if (g_last.had < g_last.pause || (g_last.pause > 0.0 && g_last.n_had < MIN_TOKENS)) {
        return 0;
    }
    const double n = g_last.per_s * STALL_S / n_waiting;
    return std::min(n_most, std::max(LEAST, int32_t(std::min(n, double(n_most)))));
}

void server_passes_begin(std::vector<server_passes_prompt> prompts, int32_t n_waiting, int32_t n_long,
                         int32_t n_batches) {
    g_last.n_waiting = n_waiting;
    g_last.n_long    = n_long;
    // a token alone is not worth reading counters
    const auto [done, n_layers] = prompts.empty() ? std::pair(0.0, 0) : server_hobbit_layers();

    std::lock_guard<std::mutex> lock(g_pass.mutex);
    g_pass.prompts  = std::move(prompts);
    g_pass.start    = seconds();
    g_pass.n_before = done;
    g_pass.n_layers = n_layers * n_batches;
}

void server_passes_end() {
    const double taken = seconds() - g_pass.start;
    if (g_last.n_long > 0) {
        g_last.pause = g_last.n_waiting > 0 ? taken : 0.0;
        g_last.per_s = g_last.n_long / taken;
        g_last.had   = 0.0;
        g_last.n_had = 0;
    } else if (g_last.n_waiting > 0) {
        g_last.had += taken;
        g_last.n_had++;
    }
    std::lock_guard<std::mutex> lock(g_pass.mutex);
    g_pass.prompts.clear();
}

json server_passes_progress() {
    json         all  = json::array();
    const double done = server_hobbit_layers().first;

    std::lock_guard<std::mutex> lock(g_pass.mutex);
    const double                n_done = std::min(std::max(done - g_pass.n_before, 0.0), g_pass.n_layers);
    for (const auto & prompt : g_pass.prompts) {
        const double n_read = prompt.n_read + prompt.n_pass * (g_pass.n_layers > 0 ? n_done / g_pass.n_layers : 0.0);
        const double n_left = prompt.n_tokens - (prompt.n_done - prompt.n_read) - n_read;
        json         one    = {
            { "slot", prompt.slot },          { "tokens", prompt.n_done },   { "tokens_all", prompt.n_tokens },
            { "tokens_pass", prompt.n_pass }, { "layers", int64_t(n_done) }, { "layers_all", int64_t(g_pass.n_layers) },
        };
        if (n_read > 0) {
            one["seconds_left"] = (prompt.seconds + seconds() - g_pass.start) * n_left / n_read;
        }
        all.push_back(one);
    }
    return all;
}
