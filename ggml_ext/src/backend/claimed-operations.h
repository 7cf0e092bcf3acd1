// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

namespace hobbit {

// The operations of llama.cpp's graphs that our backend takes. Pure.

// Over experts, or over the token embedding, that a cache serves.
bool is_expert_matmul(const ggml_tensor * op);
bool is_row_lookup(const ggml_tensor * op);

// The expert matmul that the tensor is, or is made of by at most so many element-wise operations alone; null: none.
const ggml_tensor * find_matmul(const ggml_tensor * tensor, int depth = 8);

// Returns true if the backend of this device serves them.
bool is_of_device(const ggml_tensor * weights, ggml_backend_dev_t dev);

// Claiming what lies between its matmuls makes a layer one split. After the last matmul only what still belongs to
// single experts is claimed: its bias and its per-expert scale, not the weighting and the sum.
bool is_between_matmuls(const ggml_tensor * op, ggml_backend_dev_t dev);

} // namespace hobbit
