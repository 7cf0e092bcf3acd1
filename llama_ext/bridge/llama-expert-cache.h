// SPDX-License-Identifier: MIT
#pragma once

#include "llama.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct hobbit_context;
struct hobbit_model;

// The model's expert cache, for the functions of hobbit.h; NULL where the model runs without one. Valid while the model
// is, or while the caller holds a reference of its own (hobbit_ref).
LLAMA_API struct hobbit_model * llama_model_expert_cache(const struct llama_model * model);

// The context's handle, for the functions of hobbit.h; NULL where its model runs without an expert cache. Valid while
// the context is.
LLAMA_API struct hobbit_context * llama_expert_cache_context(const struct llama_context * ctx);

// HOST:PORT of an RPC server that does not answer any more, while models that used it are open; NULL: there is none.
// Valid for ever. Any thread may call it.
LLAMA_API const char * llama_lost_machine(void);

// Bytes in host memory: weights with the vocabulary, KV cache and the like, compute buffers. Devices count only as
// their compute buffers. `snapshot`: of what a snapshot of one sequence holds (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY), 0
// where tokens can be removed without one; not a part of the others. Where the model was opened
// with no_alloc: what they would be.
struct llama_host_memory {
    uint64_t model;
    uint64_t context;
    uint64_t compute;
    uint64_t device_compute;
    uint64_t snapshot;
};

LLAMA_API struct llama_host_memory llama_get_host_memory(const struct llama_context * ctx);

// The context keeps the states that a draft head (MTP) reads with its tokens, if `masked` only those of tokens whose
// logits are wanted.
LLAMA_API void llama_keep_head_states(struct llama_context * ctx, bool masked);

#ifdef __cplusplus
}
#endif
