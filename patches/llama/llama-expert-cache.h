// SPDX-License-Identifier: MIT
#pragma once

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

struct hobbit_model;

// The model's expert cache, for the functions of hobbit.h; NULL where the model runs without one. Valid while the model
// is, or while the caller holds a reference of its own (hobbit_ref).
LLAMA_API struct hobbit_model * llama_model_expert_cache(const struct llama_model * model);

#ifdef __cplusplus
}
#endif
