// SPDX-License-Identifier: MIT
#pragma once

// The patches of server-context.cpp call this: it hands the slots to the hooks, and does what they say. Server is
// server_context_impl, whose friend this is: only that file knows it, so these are templates.
//
// Thread-safety: the thread that computes calls all of this, but for `ask_end`, and `process` while a pass is computed.

#include "server-queue.h"

#include <chrono>
#include <thread>

template <class Server>
struct server_door {
    static inline server_pass pass; // the last one that was planned

    // Asks for the end of start_loop(), which may not have begun. Any thread.
    static void ask_end(Server & server) {
        server_task task(SERVER_TASK_TYPE_NEXT_RESPONSE);
        task.id    = server.queue_tasks.get_new_id();
        is_ending_ = true;
        server.queue_tasks.post(std::move(task));
        server_call(&server_hooks::end);
    }

    // A model was loaded: can it be used?
    static bool is_loaded(Server & server) {
        server_call(&server_hooks::use, server.ctx_tgt);
        const auto failure = server_report_failure(server.ctx_tgt);
        if (!failure.empty()) {
            SRV_ERR("failed to warm up the model: %s\n", failure.c_str());
        }
        return failure.empty();
    }

    // Loads a model after a sleep, and tries again where that fails, until the server ends.
    static bool load_again(Server & server) {
        for (int pause_s = 1; !is_ending_ && !server.load_model(server.params_base);
             pause_s     = std::min(2 * pause_s, 30)) {
            SRV_ERR("the model cannot be loaded again; the next try is in %d s\n", pause_s);
            server.destroy();
            for (int i = 0; i < 10 * pause_s && !is_ending_; i++) {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
            }
        }
        return true;
    }

    // Slots take back what they kept before the loop, and keep it after that, when those who wait have got answers.
    static void keep(Server & server, bool is_end) {
        const auto one = [&](int32_t id, const std::string & path) {
            server.slots[id].release();
            server_task task(is_end ? SERVER_TASK_TYPE_SLOT_SAVE : SERVER_TASK_TYPE_SLOT_RESTORE);
            task.slot_action = { id, "", path };
            process(server, std::move(task), false);
        };
        if (is_end) {
            server.queue_results.terminate();
        }
        server_call(&server_hooks::keep, server.ctx_tgt, views(server), is_end, one);
    }

    // A task has come. Returns false if it has to come again, after the pass that is computed. An exception ends its
    // request alone.
    static bool process(Server & server, server_task && task, bool is_yielding) {
        const int32_t id = task.id;
        if (is_ending_) {
            server.queue_tasks.terminate();
        }
        if (task.type == SERVER_TASK_TYPE_CANCEL) {
            server_call(&server_hooks::left, task.id_target);
        }
        try {
            if (is_yielding && task.type == SERVER_TASK_TYPE_NEXT_RESPONSE && id < 0) { // computing goes on
                tell_progress(server);
            } else if (task.need_sampling() && task.n_tokens() >= server.n_ctx_slot()) { // it needs not wait for that
                const char * what =
                    "request (%d tokens) exceeds the available context size (%d tokens), try increasing it";
                server.send_error(id, string_format(what, task.n_tokens(), server.n_ctx_slot()),
                                  ERROR_TYPE_EXCEED_CONTEXT_SIZE, task.n_tokens(), server.n_ctx_slot());
            } else if (is_yielding) {
                return server.process_single_task(std::move(task), true);
            } else {
                process_between_passes(server, std::move(task));
            }
        } catch (const std::exception & e) {
            server.send_error(id, e.what());
        }
        return true;
    }

    // Computes a pass. An exception before it ends the requests: llama.cpp catches those of the pass alone.
    static void update(Server & server) {
        try {
            server.update_slots();
        } catch (const std::exception & e) {
            server.abort_all_slots(e.what());
        }
        for (auto & slot : server.slots) { // before a task that lists the slots
            if (!slot.is_processing()) {
                slot.smpl.reset();      // it has a copy of the grammar
                slot.task_prev.reset(); // the request that has ended
            }
        }
    }

    // Begins a request in a slot, or refuses it.
    template <class Slot>
    static bool begin(Server & server, Slot & slot, const server_task & task) {
        make_room(server, slot, {}); // a prompt of the cache brings its own checkpoints
        const auto & hobbit = task.params.hobbit;
        const bool   shares = server.params_base.kv_unified && server.slots.size() > 1;
        const auto   error  = server_begin_settings(server.ctx_tgt, slot.id, hobbit, shares);
        if (!error.empty()) {
            server.send_error(task, error, ERROR_TYPE_INVALID_REQUEST);
            return false;
        }
        // tokens computed in lower precision than this request asks for must not enter its answer
        const auto asked = server_precision(server.ctx_tgt, slot.id);
        if (!task.params.cache_prompt || hobbit.alone || !hobbit_precision_covers(slot.prompt.hobbit, asked)) {
            slot.prompt_clear();
        }
        slot.prompt.hobbit = hobbit_lower_precision(slot.prompt.hobbit, asked);
        return true;
    }

    // Tokens of the slot's prompt that are read, for a report of progress.
    template <class Slot>
    static size_t n_read(const Slot & slot) {
        return told_ < 0 ? slot.prompt.tokens.size() : size_t(told_);
    }

    // Frees checkpoints until the slot's states in these contexts fit, or none is left.
    template <class Slot>
    static bool make_room(Server & server, const Slot & slot, std::initializer_list<llama_context *> contexts) {
        size_t size = 0;
        for (llama_context * ctx : contexts) {
            size += ctx ? llama_state_seq_get_size_ext(ctx, slot.id, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) : 0;
        }
        bool       fits   = true;
        const auto victim = [&] { return server_checkpoint_victim(views(server), slot.id, size, fits); };
        for (int32_t id = victim(); id >= 0; id = victim()) {
            server.slots[id].prompt.checkpoints.pop_front();
        }
        return fits;
    }

    // The slots that have a turn in the next pass, in the order in which they read prompts.
    static auto plan_pass(Server & server) {
        pass = { int32_t(llama_n_batch(server.ctx_tgt)), int32_t(llama_n_ubatch(server.ctx_tgt)) };
        for (auto & slot : server.slots) {
            if (slot.task && !slot.can_split() && slot.task->n_tokens() > pass.n_ubatch) {
                const char * what = "the text has %d tokens, and %d can be embedded: shorten it, or start the server "
                                    "with a larger --batch or --ctx-size";
                server.send_error(slot, string_format(what, slot.task->n_tokens(), pass.n_ubatch),
                                  ERROR_TYPE_INVALID_REQUEST);
                slot.release();
            }
        }
        server_call(&server_hooks::plan_pass, views(server), pass);
        std::vector<decltype(&server.slots[0])> turns;
        for (const int32_t id : pass.turns) {
            turns.push_back(&server.slots[id]);
        }
        return turns;
    }

    static void before_pass(Server & server) {
        pass.count(server.batch.size());
        for (auto & slot : server.slots) {
            if (slot.task && slot.task->params.stream) {
                slot.generated_token_probs.clear(); // they have been sent
            }
        }
        server_call(&server_hooks::before_pass, views(server), pass, server.batch.view.size());
    }

    // A pass is over: was it aborted?
    static bool is_aborted(Server & server, int status) {
        server_call(&server_hooks::after_pass);
        if (status == 2) {
            drop_batch(server, true, server.ctx_tgt_seq_rm_type == COMMON_CONTEXT_SEQ_RM_TYPE_PART);
        }
        return status == 2;
    }

    // Ends an answer where the slots have used up the cells that they share, before a part of the batch was computed.
    static bool end_answer(Server & server, int32_t n_computed) {
        const bool    is_first = n_computed == 0 && server.batch.view.size() == server.batch.size();
        const int32_t id       = server_longest_answer(views(server), n_shared_cells(server));
        if (id < 0 || !is_first || !server.params_base.kv_unified) {
            return false;
        }
        drop_batch(server, false, true);
        auto & slot         = server.slots[id];
        slot.truncated      = true;
        slot.stop           = STOP_TYPE_LIMIT;
        slot.has_next_token = false;
        slot.print_timings();
        server.send_final_response(slot);
        slot.release();
        slot.prompt_clear();
        return true;
    }

  private:
    static inline std::atomic<bool>    is_ending_{ false };
    static inline thread_local int32_t told_ = -1; // n_read() of the report that this thread sends; -1: of another

    static int32_t n_shared_cells(const Server & server) {
        return server.params_base.kv_unified ? int32_t(llama_n_ctx(server.ctx_tgt)) : 0;
    }

    // All slots, and what the batch has of each.
    static server_slot_views views(const Server & server) {
        server_slot_views all;
        for (const auto & slot : server.slots) {
            using state            = decltype(slot.state);
            const int32_t n_prompt = slot.task ? slot.task->n_tokens() : 0;
            const int32_t n_tokens = slot.prompt.n_tokens();
            const int32_t n_read   = slot.state == state::SLOT_STATE_PROCESSING_PROMPT ? n_tokens
                                     : slot.state == state::SLOT_STATE_STARTED         ? 0
                                                                                       : n_prompt;
            all.push_back({ slot.id, slot.task ? slot.task->id : -1, slot.is_processing(),
                            slot.state == state::SLOT_STATE_GENERATING, slot.state == state::SLOT_STATE_WAIT_OTHER,
                            slot.task && slot.task->is_child(), slot.task && slot.task->params.hobbit.alone, n_prompt,
                            n_prompt - n_read, n_tokens, slot.t_last_used, &slot.prompt.checkpoints,
                            slot.spec_ckpt.size(), &slot.stats });
        }
        for (const auto & token : server.batch.tokens) {
            all[token.id_slot].n_batch++;
            all[token.id_slot].n_prompt_batch += token.is_prompt;
        }
        return all;
    }

    // Takes the tokens of a batch that was aborted, or not begun, back out of the slots and the memory.
    static void drop_batch(Server & server, bool is_begun, bool can_go_back) {
        for (const auto & view : views(server)) {
            auto & slot = server.slots[view.id];
            if (view.n_batch > 0 && is_begun && (!can_go_back || slot.prompt.tokens.has_mtmd)) {
                slot.prompt_clear();
            } else if (view.n_batch > 0) {
                slot.prompt.tokens.keep_first(slot.prompt.n_tokens() - view.n_batch);
                if (is_begun) {
                    slot.mem.seq_rm(slot.id, slot.prompt.tokens.pos_next(), -1);
                }
            }
            slot.spec_i_batch.clear();
            if (view.n_batch > 0 && slot.state == decltype(slot.state)::SLOT_STATE_DONE_PROMPT) {
                slot.state = decltype(slot.state)::SLOT_STATE_PROCESSING_PROMPT;
            }
        }
        server.batch.clear();
    }

    static void tell_progress(Server & server) {
        server_call(&server_hooks::progress, [&](int32_t id, int32_t n_read) {
            auto & slot = server.slots[id];
            if (slot.task->params.stream && slot.task->params.return_progress) {
                told_ = n_read;
                server.send_partial_response(slot, {}, true);
                told_ = -1;
            }
        });
    }

    static void process_between_passes(Server & server, server_task && task) {
        const bool    is_text = task.need_sampling() || task.need_embd();
        const bool    is_save = task.type == SERVER_TASK_TYPE_SLOT_SAVE;
        const bool    is_kept = task.type == SERVER_TASK_TYPE_SLOT_RESTORE;
        const int32_t id_slot = task.slot_action.id_slot;
        auto *        slot    = is_save || is_kept ? server.get_slot_by_id(id_slot) : nullptr;
        const auto    usual   = [&] { return server_precision(server.ctx_tgt); };

        if (is_text && !task.cli &&
            !server_may_begin(views(server), task.id, task.n_tokens(), int32_t(task.child_tasks.size()),
                              n_shared_cells(server))) {
            server.queue_tasks.defer(std::move(task));
        } else if (is_save && slot && !slot->is_processing() &&
                   !hobbit_precision_covers(slot->prompt.hobbit, usual())) {
            server.send_error(task,
                              "This slot was computed with thresholds below the server's, which a file does not keep",
                              ERROR_TYPE_NOT_SUPPORTED);
        } else {
            server.process_single_task(std::move(task), false);
        }
        if (is_kept && slot && !slot->is_processing() && slot->prompt.n_tokens() > 0) {
            slot->prompt.hobbit = usual();
            slot->t_last_used   = ggml_time_us();
        }
    }
};
