// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"

namespace hobbit {

// Wraps the buffer type `memory` as a type of `device`. ggml's scheduler assigns an operation to the first backend that
// supports the memory of its operands; with a type of its own, `device` is not mistaken for the owner of `memory`.
// Buffers are allocated from `memory`.
ggml_backend_buffer_type make_aliased_buffer_type(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device);

} // namespace hobbit
