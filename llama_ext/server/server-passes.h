// SPDX-License-Identifier: MIT
#pragma once

// The passes of llama-server over prompts: how large they are while others wait for tokens, and how far they are.
// Thread-safety: the thread that computes calls all but server_passes_progress(), which any thread may call.

#include <cstdint>
#include <vector>

class common_json;

// A prompt with more tokens left is long: the next pass need not read it.
static constexpr int32_t SERVER_PASSES_SHORT = 64;

// Tokens of long prompts for the next pass, at most n_most, while n_waiting slots wait for a token each. A pass takes
// all together a few seconds; then these slots get as much time, and 20 tokens, before the next one.
int32_t server_passes_tokens(int32_t n_waiting, int32_t n_most);

// A prompt that a pass reads a part of.
struct server_passes_prompt {
    int32_t slot     = 0;
    int32_t n_tokens = 0; // the whole prompt
    int32_t n_done   = 0; // before the pass
    int32_t n_pass   = 0; // in the pass
    int32_t n_read   = 0; // before the pass, without those that were kept
    double  seconds  = 0; // since its reading began
};

// A pass begins, in n_batches graphs; n_long: its tokens of long prompts.
void server_passes_begin(std::vector<server_passes_prompt> prompts, int32_t n_waiting, int32_t n_long,
                         int32_t n_batches);
void server_passes_end();

// The prompts that are read: slot, tokens read and in all, those of this pass, its layers, and seconds left where
// known.
common_json server_passes_progress();
