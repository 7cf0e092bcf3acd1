// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"
#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of host memory that a model takes with a context.
struct llama_hobbit_plan {
    uint64_t weights;        // weights with the vocabulary, without those that stay on disk
    uint64_t context;        // KV cache and the like
    uint64_t compute;        // buffers of llama.cpp's graphs
    uint64_t device_compute; // such buffers in the memory of devices
    uint64_t head;           // the draft head's part of context and compute
    uint64_t snapshot;   // one sequence's (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY), no part of the others; 0: needs none
    uint32_t n_rollback; // tokens by which a sequence's state can go back
    uint32_t n_ctx_less; // where memory is short: the largest half, quarter and so on of the context that fits, or 0
    struct hobbit_pool_plan pools; // zeros without an expert cache
};

// Sizes that the plan chooses by memory, where nobody says them.
struct llama_hobbit_choice {
    uint64_t         available; // bytes that this process may take
    const uint32_t * contexts;  // larger sizes of the context that may replace it: tokens, ascending
    size_t           n_contexts;
    const uint32_t * batches; // tokens of a pass, likewise
    size_t           n_batches;
    double           share;     // part of the pools that a larger context may take, and a larger pass
    bool             has_pools; // hobbit.pools is given
    bool             has_head;  // the draft head (MTP) in the model's file runs beside it
};

// Plans a model of no_alloc with a context of these parameters, where the choice then stands. cache: the model's, or
// NULL. Allocates nothing, commits no page and reads nothing behind headers; hobbit_get_info and hobbit_get_device then
// tell the planned pools. A larger context, and then a larger pass, is chosen if it leaves the experts what `share`
// says. Where all experts fit, they still do, and a model without a cache leaves half of what is free. Returns false
// where the model cannot be opened like this, with the reason in `err` (empty: in llama.cpp's log) and pools.shortage.
LLAMA_API bool llama_hobbit_plan_make(struct llama_model * model, hobbit_model * cache,
                                      struct llama_context_params * params, const struct llama_hobbit_choice * choice,
                                      struct llama_hobbit_plan * plan, char * err, size_t err_size);

#ifdef __cplusplus
}

// The fields up to `snapshot`, of a context that may be allocated, without a head.
llama_hobbit_plan llama_hobbit_needs(const llama_context & lctx, const hobbit_model * cache);
#endif
