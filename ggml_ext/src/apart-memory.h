// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"

namespace hobbit {

// A device's memory, as a buffer type of another device's. Backends of the first compute in it asynchronously, and only
// they can be waited for: ggml's scheduler copies what crosses the border between two buffer types, and waits for the
// backend that it comes from. Its buffers are those of `memory`, under this type.
ggml_backend_buffer_type make_apart_memory(ggml_backend_buffer_type_t memory, ggml_backend_dev_t device);

} // namespace hobbit
