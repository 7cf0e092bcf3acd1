// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <algorithm>
#include <map>

namespace hobbit {

namespace {

// W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on
// Storage 13(4), 2017). New experts enter a small LRU window. An expert that leaves the window is admitted to the main
// space only if it was used more often than the main space's next victim. The main space is a segmented LRU: a hit
// moves an expert from its probation segment to its protected one. After 10 uses per slot all counts are halved.
//
// The number of experts is small, so each has a 4-bit counter of its own in place of the paper's sketch. The window has
// the paper's 1 % of the slots, but no fewer than one layer uses, because the running layer's experts are pinned.
class w_tinylfu_pool : public pool_policy {
  public:
    w_tinylfu_pool(const policy_options & options, uint32_t n_slots) :
        n_slots_(n_slots),
        n_window_(std::max(n_slots / 100, std::min(n_slots, options.n_used))),
        n_protected_((n_slots - n_window_) * 4 / 5),
        experts_(options.table<expert>()) {}

    void on_insert(expert_id id) override {
        count_use(id);
        move(id, WINDOW);
        demote(WINDOW, n_window_);
    }

    void on_hit(expert_id id) override {
        count_use(id);
        const segment from = experts_[id].in;
        move(id, from == PROBATION ? PROTECTED : from);
        demote(PROTECTED, n_protected_);
    }

    void on_evict(expert_id id) override { leave(id); }

    bool admits(expert_id newcomer, expert_id victim) override {
        return experts_[newcomer].n_uses >= experts_[victim].n_uses;
    }

    expert_id victim(const std::vector<candidate> & candidates, layer_id) override {
        const candidate * first[N_SEGMENTS] = {}; // the least recent one of each segment
        for (const candidate & c : candidates) {
            const candidate *& f = first[experts_[c.id].in];
            f                    = !f || experts_[c.id].moved < experts_[f->id].moved ? &c : f;
        }
        const candidate * main   = first[PROBATION] ? first[PROBATION] : first[PROTECTED];
        const candidate * window = first[WINDOW];
        if (!main || !window) {
            return main ? main->id : window->id;
        }
        const bool leaves_window = order_[WINDOW].size() >= n_window_;
        return leaves_window && experts_[window->id].n_uses <= experts_[main->id].n_uses ? window->id : main->id;
    }

  private:
    enum segment : uint8_t { WINDOW, PROBATION, PROTECTED, N_SEGMENTS };

    struct expert {
        segment  in     = N_SEGMENTS; // none
        uint8_t  n_uses = 0;          // 0 to 15
        uint64_t moved  = 0;          // its place in the order of the segment
    };

    void count_use(expert_id id) {
        uint8_t & n = experts_[id].n_uses;
        n           = uint8_t(std::min(n + 1, 15));
        if (++n_counted_ >= 10 * uint64_t(n_slots_)) {
            std::for_each(experts_.begin(), experts_.end(), [](expert & e) { e.n_uses /= 2; });
            n_counted_ /= 2;
        }
    }

    void leave(expert_id id) {
        expert & e = experts_[id];
        if (e.in != N_SEGMENTS) {
            order_[e.in].erase(e.moved);
        }
        e.in = N_SEGMENTS;
    }

    void move(expert_id id, segment to) {
        leave(id);
        experts_[id].in    = to;
        experts_[id].moved = ++clock_;
        order_[to][clock_] = id;
    }

    void demote(segment from, size_t n_most) {
        while (order_[from].size() > n_most) {
            move(order_[from].begin()->second, PROBATION);
        }
    }

    const uint32_t n_slots_;
    const uint32_t n_window_;
    const uint32_t n_protected_;

    expert_table<expert>          experts_;
    std::map<uint64_t, expert_id> order_[N_SEGMENTS]; // least recently used first
    uint64_t                      clock_     = 0;
    uint64_t                      n_counted_ = 0; // uses since the counts were halved
};

const auto registered = registered_policy::of<per_pool_policy<w_tinylfu_pool>>("w-tinylfu");

} // namespace

} // namespace hobbit
