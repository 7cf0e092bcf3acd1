// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-task.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_set>

// The passes over prompts: how large they are while others wait for tokens, whose turn it is, and how far they are. One
// that nobody waits for is aborted: it must delay neither the server's end nor others when its clients have left.

namespace {

constexpr double  STALL_S    = 4.0; // seconds by which a part of a long prompt may delay all waiting slots together
constexpr int32_t LEAST      = 512; // with fewer tokens a pass reads nearly as many experts
constexpr int32_t MIN_TOKENS = 20;  // one pause in so many tokens stays beyond the 95th percentile

double seconds() {
    return double(ggml_time_us()) / 1e6;
}

const auto is_writing = std::mem_fn(&server_slot_view::is_writing);

std::map<int32_t, double> g_waits; // requests that wait for several slots or for cells, and seconds() since when

bool is_overdue(const std::pair<const int32_t, double> & wait) {
    return seconds() - wait.second > 5.0;
}

class passes_hooks : public server_hooks {
  public:
    void use(llama_context * ctx) override {
        if (ctx) {
            llama_set_abort_callback(ctx, [](void * p) { return static_cast<passes_hooks *>(p)->aborts(); }, this);
        }
    }

    void left(int32_t id_task) override {
        g_waits.erase(id_task);
        if (tasks_.erase(id_task) > 0) {
            is_left_ = tasks_.empty();
        }
    }

    void end() override { is_ending_ = true; }

    // Requests with passes of their own take turns with all others, and short prompts never wait for long ones.
    void plan_pass(const server_slot_views & slots, server_pass & pass) override {
        const int32_t n_waiting = int32_t(std::count_if(slots.begin(), slots.end(), is_writing));
        const int32_t turn      = next_turn(slots, tokens(n_waiting, 1) > 0);

        for (const auto & slot : slots) {
            if (turn < 0 ? !slot.is_alone : turn == slot.id) {
                pass.turns.push_back(slot.id);
            }
        }
        std::stable_sort(pass.turns.begin(), pass.turns.end(),
                         [&](int32_t a, int32_t b) { return slots[a].n_left < slots[b].n_left; });
        pass.n_long = tokens(n_waiting, pass.n_batch);
        if (turn >= 0) { // a request alone reads in the parts that it has where nobody waits
            pass.n_long = pass.n_batch % pass.n_ubatch == 0 ? pass.n_ubatch : pass.n_batch;
        }
    }

    void before_pass(const server_slot_views & slots, const server_pass & pass, int32_t n_tokens) override {
        n_waiting_ = int32_t(std::count_if(slots.begin(), slots.end(), is_writing));
        n_long_    = pass.n_read;

        const auto add      = [](int32_t n, const auto & slot) { return n + slot.n_batch; };
        const bool is_whole = n_tokens == std::accumulate(slots.begin(), slots.end(), 0, add);
        for (const auto & slot : slots) {
            if (is_whole && slot.n_batch > 0) { // answers may have got tokens of another part
                tasks_.insert(slot.id_task);
            }
        }

        std::vector<server_slot_view> prompts;
        std::copy_if(slots.begin(), slots.end(), std::back_inserter(prompts),
                     [](auto & s) { return s.n_prompt_batch > 0; });
        // counters are not read for single tokens
        const auto [done, n_layers] = prompts.empty() ? std::pair(0.0, 0) : server_report_layers();

        std::lock_guard<std::mutex> lock(mutex_);
        prompts_  = std::move(prompts);
        start_    = seconds();
        told_     = start_;
        n_before_ = done;
        n_layers_ = n_layers * ((n_tokens + pass.n_ubatch - 1) / pass.n_ubatch);
    }

    void after_pass() override {
        tasks_.clear();
        is_left_ = false;

        const double taken = seconds() - start_;
        if (n_long_ > 0) {
            pause_ = n_waiting_ > 0 ? taken : 0.0;
            per_s_ = n_long_ / taken;
            had_   = 0.0;
            n_had_ = 0;
        } else if (n_waiting_ > 0) {
            had_ += taken;
            n_had_++;
        }
        std::lock_guard<std::mutex> lock(mutex_);
        prompts_.clear();
    }

    void progress(const std::function<void(int32_t, int32_t)> & tell) override {
        std::lock_guard<std::mutex> lock(mutex_);
        if (seconds() - told_ < 1.0 || n_layers_ <= 0.0) {
            return;
        }
        told_ = seconds();
        for (const auto & prompt : prompts_) {
            tell(prompt.id, prompt.n_tokens - int32_t(prompt.n_prompt_batch * (1.0 - share())));
        }
    }

    // The prompts that are read: slot, tokens read, in all and in this pass, its layers, and seconds left if known.
    void values(json & data) override {
        json all = json::array();

        std::lock_guard<std::mutex> lock(mutex_);
        const double                done = share();
        for (const auto & prompt : prompts_) {
            const int32_t n_before = prompt.n_tokens - prompt.n_prompt_batch; // in the slot, kept ones included
            const double  n_pass   = prompt.n_prompt_batch * done;
            const double  n_read   = double(prompt.stats->n_prompt_processed) + n_pass;
            const double  n_left   = prompt.n_prompt - n_before - n_pass;

            json one           = { { "slot", prompt.id }, { "tokens", n_before }, { "tokens_all", prompt.n_prompt } };
            one["tokens_pass"] = prompt.n_prompt_batch;
            one["layers"]      = int64_t(std::llround(done * n_layers_));
            one["layers_all"]  = int64_t(n_layers_);
            if (n_read > 0) {
                one["seconds_left"] = (prompt.stats->t_prompt_ms() / 1e3 + seconds() - start_) * n_left / n_read;
            }
            all.push_back(one);
        }
        data["reading"] = all;
    }

  private:
    bool aborts() const { return is_left_ || is_ending_; }

    // How much of the pass is computed, from 0 to 1. REQUIRES: mutex_ is held
    double share() const {
        const double n_done = server_report_layers().first - n_before_;
        return n_layers_ > 0.0 ? std::min(std::max(n_done / n_layers_, 0.0), 1.0) : 0.0;
    }

    // Tokens of long prompts for the next pass, at most n_most, while n_waiting slots wait for a token each. A pass
    // takes all together a few seconds; then these slots get as much time, and 20 tokens, before the next one.
    int32_t tokens(int32_t n_waiting, int32_t n_most) const {
        if (n_waiting == 0) {
            return n_most;
        }
        if (had_ < pause_ || (pause_ > 0.0 && n_had_ < MIN_TOKENS)) {
            return 0;
        }
        const double n = per_s_ * STALL_S / n_waiting;
        return std::min(n_most, std::max(LEAST, int32_t(std::min(n, double(n_most)))));
    }

    // The slot whose request is computed alone, if it is its turn; -1: the turn of all others.
    int32_t next_turn(const server_slot_views & slots, bool can_read) {
        const size_t last = last_turn_;
        for (size_t i = 1; i <= slots.size(); i++) {
            const auto & slot = slots[(last + i) % slots.size()];
            if (slot.is_busy && !slot.is_waiting && (can_read || slot.n_left <= server_pass::SHORT_PROMPT)) {
                last_turn_ = slot.id;
                return slot.is_alone ? slot.id : -1;
            }
        }
        return -1;
    }

    // The last pass over long prompts, and the passes of waiting slots since. Only the computing thread reads it.
    double  pause_     = 0.0; // seconds that others waited for it
    double  per_s_     = 0.0; // tokens per second
    double  had_       = 0.0; // seconds of passes for others since
    int32_t n_had_     = 0;   // tokens that each of them has had since
    int32_t n_long_    = 0;   // tokens of long prompts in the pass that is computed
    int32_t n_waiting_ = 0;
    size_t  last_turn_ = 0;

    std::unordered_set<int32_t> tasks_; // requests with tokens in the pass, without those that were cancelled
    std::atomic<bool>           is_left_   = false; // there were some, and none is left
    std::atomic<bool>           is_ending_ = false;

    // The pass that is computed. Guarded by mutex_, but for reading by the thread that computes.
    std::mutex        mutex_;
    server_slot_views prompts_;        // slots of which it reads a part; their stats stay as they are meanwhile
    double            start_    = 0.0; // seconds()
    double            told_     = 0.0; // seconds() when progress was told
    double            n_before_ = 0.0; // layers computed before the pass
    double            n_layers_ = 0.0; // layers of the whole pass
};

} // namespace

// Slots are free, and the cells that they share hold this prompt beside other requests. One that waits for that, or for
// several slots at once, is not overtaken for ever: later ones wait for it where others are busy.
bool server_may_begin(const server_slot_views & slots, int32_t id_task, int32_t n_tokens, int32_t n_children,
                      int32_t n_cells) {
    int64_t n_others = 0;
    int32_t n_free   = 0;
    for (const auto & slot : slots) {
        n_others += slot.is_busy && !slot.is_child ? std::max(slot.n_tokens, slot.n_prompt) : 0;
        n_free   += !slot.is_busy;
    }
    const auto own       = g_waits.lower_bound(id_task);
    const bool is_behind = n_free < int32_t(slots.size()) && std::any_of(g_waits.begin(), own, is_overdue);
    const bool fits      = n_others == 0 || n_cells == 0 || n_others + n_tokens < n_cells;
    const bool may       = !is_behind && fits && (n_free == 0 || n_free > n_children);
    if (may && n_free > 0) {
        g_waits.erase(id_task);
    } else if (!may && !is_behind) {
        g_waits.emplace(id_task, seconds());
    }
    return may;
}

bool server_is_overdue(int32_t id_task) {
    const auto wait = g_waits.find(id_task);
    return wait != g_waits.end() && is_overdue(*wait);
}

int32_t server_longest_answer(const server_slot_views & slots, int32_t n_cells) {
    int64_t n_all     = 0;
    int32_t n_longest = -1, id = -1;
    for (const auto & slot : slots) {
        n_all += slot.n_tokens;
        if (slot.is_writing && slot.n_tokens > n_longest) {
            n_longest = slot.n_tokens;
            id        = slot.id;
        }
    }
    return n_all > n_cells ? id : -1;
}

server_hooks & server_hooks_passes = server_hooks_of<passes_hooks>();
