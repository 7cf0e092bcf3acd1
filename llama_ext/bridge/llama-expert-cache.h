// SPDX-License-Identifier: MIT
#pragma once

#include "llama.h"

extern "C" {

struct hobbit_context;
struct hobbit_model;

// The model's expert cache, for the functions of hobbit.h; NULL where the model runs without one. Valid while the model
// is, or while the caller holds a reference of its own (hobbit_ref).
LLAMA_API struct hobbit_model * llama_model_expert_cache(const struct llama_model * model);

// The context's handle for hobbit.h, valid while the context is; NULL where its model has no expert cache.
LLAMA_API struct hobbit_context * llama_expert_cache_context(const struct llama_context * ctx);

// HOST:PORT of an RPC server that does not answer any more, while models that used it are open; NULL: there is none.
// Valid for ever. Any thread may call it.
LLAMA_API const char * llama_lost_machine(void);
}
