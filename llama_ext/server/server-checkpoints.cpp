// SPDX-License-Identifier: MIT
#include "server-common.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <tuple>

// Slots keep context checkpoints, in the part of the memory that the model's plan left for all of them, and their
// states in files while the server is stopped, by HOBBIT_KEEP_SLOTS=BYTES:PATH.

namespace {

constexpr uint64_t HEADER = 4096; // bytes of a file beside state and tokens, at most

// Ends a file with a hash of its path and its bytes, or tells whether it has it.
bool seal(const std::string & path, bool is_new) {
    std::fstream   file(path, std::ios::in | std::ios::out | std::ios::binary | std::ios::ate);
    uint64_t       hash = server_hash(path), found = 0;
    std::streamoff left = file.tellg() - std::streamoff(is_new ? 0 : sizeof(found));
    file.seekg(0);
    for (std::string part; left > 0 && file; left -= part.size()) {
        part.resize(std::min<std::streamoff>(left, 1 << 16));
        file.read(part.data(), part.size());
        hash = server_hash(part, hash);
    }
    if (is_new) {
        return bool(file.seekp(0, std::ios::end).write(reinterpret_cast<char *>(&hash), sizeof(hash)));
    }
    return file.read(reinterpret_cast<char *>(&found), sizeof(found)) && found == hash;
}

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

        server_add_override(params, "hobbit.snapshots", n);
        server_add_override(params, "hobbit.least_snapshots", n_drafts);
    }

    // The slots that were used last, as far as the bytes reach.
    void keep(llama_context * ctx, const server_slot_views & slots, bool is_end, const keeper & keep) override {
        const char * given = std::getenv("HOBBIT_KEEP_SLOTS");
        if (!given || !ctx) {
            return;
        }
        char *     path = nullptr;
        uint64_t   left = std::strtoull(given, &path, 10);
        const auto file = [&](const auto & slot) { return string_format("%s-%d", path + 1, slot.id); };
        for (const auto & slot : slots) {
            if (!is_end && seal(file(slot), false)) {
                keep(slot.id, file(slot));
            } else if (unlink(file(slot).c_str()) == 0 && !is_end) {
                SRV_WRN("%s is damaged, so its conversation is read again\n", file(slot).c_str());
            }
        }
        if (!is_end) {
            return;
        }
        server_slot_views order = slots;
        std::sort(order.begin(), order.end(), [](auto & a, auto & b) { return a.t_last_used > b.t_last_used; });
        umask(S_IRWXG | S_IRWXO); // nobody else reads a conversation
        for (const auto & slot : order) {
            const uint64_t size = llama_state_seq_get_size(ctx, slot.id) + slot.n_tokens * sizeof(llama_token) + HEADER;
            if (slot.n_tokens > 0 && size <= left) {
                keep(slot.id, file(slot));
                left -= seal(file(slot), true) ? size : 0;
            }
        }
    }
};

} // namespace

// The slot with the most checkpoints drops its oldest; among equals this slot, then the one unused for longest.
int32_t server_checkpoint_victim(const server_slot_views & slots, int32_t id_slot, size_t size, bool & fits) {
    const auto rank = [&](const server_slot_view & slot) {
        return std::make_tuple(slot.checkpoints->size(), slot.id == id_slot, -slot.t_last_used);
    };
    size_t                   held   = size;
    const server_slot_view * victim = nullptr;
    for (const auto & slot : slots) {
        held += slot.draft_bytes;
        for (const auto & each : *slot.checkpoints) {
            held += each.size();
        }
        if (!slot.checkpoints->empty() && (!victim || rank(slot) > rank(*victim))) {
            victim = &slot;
        }
    }
    fits = held <= server_report_checkpoint_bytes();
    return fits || !victim ? -1 : victim->id;
}

server_hooks & server_hooks_checkpoints = server_hooks_of<checkpoint_hooks>();
