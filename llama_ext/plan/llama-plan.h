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
    uint64_t snapshot; // one sequence's (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY), no part of the others; 0: needs none

    struct hobbit_pool_plan pools; // zeros without an expert cache
};

// Plans the memory of a context that was opened with no_alloc, and of its model. Allocates no pool, commits no page and
// reads nothing; hobbit_get_info and hobbit_get_device then tell the planned pools. `head`: the context's parameters,
// where the draft head (MTP) in the model's file runs beside it; else NULL. Returns false where the model cannot be
// opened like this, with the reason in `err`, and in pools.shortage where it is memory. The other fields are valid.
LLAMA_API bool llama_hobbit_plan_make(struct llama_context * ctx, const struct llama_context_params * head,
                                      struct llama_hobbit_plan * plan, char * err, size_t err_size);

#ifdef __cplusplus
}

// The fields up to `snapshot`, of a context that may be allocated, without a head.
llama_hobbit_plan llama_hobbit_needs(const llama_context & lctx);
#endif
