// SPDX-License-Identifier: MIT
#include "server-common.h"
#include "server-report.h"

#include <algorithm>
#include <tuple>

// The memory of context checkpoints: all slots together keep to the part that the model's plan left for them.

namespace {

class checkpoint_hooks : public server_hooks {
  public:
    // The plan leaves room for the checkpoints of all slots as far as it reaches, and for states before drafts in any
    // case. An override of hobbit.least_snapshots asks for more.
    void start(common_params & params) override {
        const auto & types = params.speculative.types;
        const bool   drafts =
            std::any_of(types.begin(), types.end(), [](auto t) { return t != COMMON_SPECULATIVE_TYPE_NONE; });
        const int64_t n_drafts = drafts ? params.n_parallel : 0; // a slot keeps the state before its draft
        const int64_t n        = int64_t(params.n_parallel) * std::max(params.n_ctx_checkpoints, 0) + n_drafts;

        server_override(params, "hobbit.snapshots", n);
        server_override(params, "hobbit.least_snapshots", n_drafts);
    }

    // The slot with the most checkpoints drops its oldest; among equals this slot, then the one unused for longest.
    void checkpoint(const server_slot_views & slots, server_checkpoint & wanted) override {
        const auto rank = [&](const server_slot_view & slot) {
            return std::make_tuple(slot.n_checkpoints, slot.id == wanted.id, -slot.t_last_used);
        };
        size_t                   held   = wanted.size;
        const server_slot_view * victim = nullptr;
        for (const auto & slot : slots) {
            held += slot.checkpoint_bytes;
            if (slot.n_checkpoints > 0 && (!victim || rank(slot) > rank(*victim))) {
                victim = &slot;
            }
        }
        wanted.fits   = held <= server_report_checkpoint_bytes();
        wanted.victim = wanted.fits || !victim ? -1 : victim->id;
    }
};

} // namespace

server_hooks & server_hooks_checkpoints = server_hooks_of<checkpoint_hooks>();
