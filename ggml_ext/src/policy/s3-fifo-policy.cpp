// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <algorithm>

namespace hobbit {

namespace {

// S3-FIFO (Yang et al., "FIFO Queues Are All You Need for Cache Eviction", SOSP 2023). New experts enter a small queue
// of 10 % of the slots. An expert with at least two hits moves on from there to the main queue; others are evicted, and
// go straight to the main queue if they come back soon, that is, while the ghost queue remembers them. The main queue
// gives an expert another turn for each hit, at most three.
class s3_fifo_pool : public pool_policy {
  public:
    s3_fifo_pool(const policy_options & options, uint32_t n_slots) :
        n_small_(std::max(n_slots / 10, 1u)),
        n_ghosts_(n_slots - n_small_),
        experts_(options.table<expert>()),
        n_in_{ size_t(options.n_layers) * options.n_experts } {}

    void on_insert(expert_id id) override {
        expert &   e        = experts_[id];
        const bool is_ghost = e.ghost > 0 && e.ghost + n_ghosts_ > n_evicted_;
        e.ghost             = 0;
        enter(e, is_ghost ? MAIN : SMALL);
        e.n_hits = 0;
    }

    void on_hit(expert_id id) override { experts_[id].n_hits = uint8_t(std::min(experts_[id].n_hits + 1, 3)); }

    void on_evict(expert_id id) override {
        expert & e = experts_[id];
        e.ghost    = e.in == SMALL ? ++n_evicted_ : 0;
        enter(e, NONE);
    }

    expert_id victim(const std::vector<candidate> & candidates, layer_id) override {
        while (true) {
            const bool is_full = n_in_[SMALL] >= n_small_;
            const auto small   = oldest(candidates, SMALL);
            const auto main    = oldest(candidates, MAIN);
            const auto id      = small && (is_full || !main) ? small->id : main->id;
            expert &   e       = experts_[id];
            if (e.in == SMALL && e.n_hits > 1) {
                e.n_hits = 0;
            } else if (e.in == MAIN && e.n_hits > 0) {
                e.n_hits--;
            } else {
                return id;
            }
            enter(e, MAIN);
        }
    }

  private:
    enum queue : uint8_t { NONE, SMALL, MAIN, N_QUEUES };

    struct expert {
        queue    in      = NONE;
        uint8_t  n_hits  = 0;
        uint64_t entered = 0; // its place in the queue
        uint64_t ghost   = 0; // number of its eviction from the small queue; 0: no ghost
    };

    void enter(expert & e, queue to) {
        n_in_[e.in]--;
        n_in_[to]++;
        e.in      = to;
        e.entered = ++clock_;
    }

    const candidate * oldest(const std::vector<candidate> & candidates, queue in) {
        const candidate * found = nullptr;
        for (const candidate & c : candidates) {
            found = experts_[c.id].in == in && (!found || experts_[c.id].entered < experts_[found->id].entered) ? &c
                                                                                                                : found;
        }
        return found;
    }

    const uint32_t       n_small_;
    const uint32_t       n_ghosts_;
    expert_table<expert> experts_;
    size_t               n_in_[N_QUEUES]; // experts
    uint64_t             clock_     = 0;
    uint64_t             n_evicted_ = 0; // from the small queue
};

const auto registered = registered_policy::of<per_pool_policy<s3_fifo_pool>>("s3-fifo");

} // namespace

} // namespace hobbit
