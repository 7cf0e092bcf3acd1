// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"

namespace hobbit {

// A device's memory, as a buffer type of another device's, which ggml's scheduler keeps apart: it gives what is
// computed in one memory to the first backend that has it. Its buffers are those of `memory`, under this type.
ggml_backend_buffer_type make_aliased_buffer_type(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device);

} // namespace hobbit
