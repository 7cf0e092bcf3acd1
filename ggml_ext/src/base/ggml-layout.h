// SPDX-License-Identifier: MIT
#pragma once

// Private structs of ggml that our code depends on. Their tables of functions are initialised by position, so a
// function that a newer ggml adds would silently move the others: this fails to compile instead. docs/upgrading.md says
// what to review.

#include "ggml-backend-impl.h"

namespace hobbit {

template <typename table>
constexpr size_t n_functions = sizeof(table) / sizeof(void (*)());

static_assert(n_functions<ggml_backend_i> == 16, "ggml_backend_i: review ggml-hobbit.cpp");
static_assert(n_functions<ggml_backend_device_i> == 15, "ggml_backend_device_i: review ggml-hobbit.cpp");
static_assert(n_functions<ggml_backend_reg_i> == 4, "ggml_backend_reg_i: review ggml-hobbit.cpp");
static_assert(n_functions<ggml_backend_buffer_i> == 11, "ggml_backend_buffer_i: review ggml-hobbit.cpp");

// Version 3 adds alloc_buffer_n and get_alloc_size_n, whose defaults are right for us; we set this table by name.
static_assert(n_functions<ggml_backend_buffer_type_i> == (GGML_BACKEND_API_VERSION == 2 ? 6 : 8),
              "ggml_backend_buffer_type_i: review ggml-hobbit.cpp");
static_assert(GGML_BACKEND_API_VERSION == 2 || GGML_BACKEND_API_VERSION == 3, "the ggml versions that were tried");

static_assert(sizeof(ggml_backend_dev_caps) == 5 * sizeof(bool), "ggml_backend_dev_caps: review ggml-hobbit.cpp");

// A node's copy in an inner graph has its operation, parameters, shape and sources; patch 0003 puts the router's
// weights and input into src[3] and src[4] of a MUL_MAT_ID.
static_assert(sizeof(ggml_tensor) == 336 && sizeof(void *) == 8, "ggml_tensor: review inner_graph::add_copy");
static_assert(GGML_MAX_SRC > 4, "MUL_MAT_ID has no room for the router's weights and input");

// A new operation between a layer's matmuls would split the layer.
static_assert(GGML_OP_COUNT == 101, "ggml_op: review is_elementwise and n_row_sources");

} // namespace hobbit
