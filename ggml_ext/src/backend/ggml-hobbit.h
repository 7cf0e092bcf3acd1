// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"

namespace hobbit {
class split_runner;
}

// The backend's device that computes on `compute`, registered with ggml once per process. A process that opens no model
// with a cache never sees the backend. May be called from any thread, but ggml's own list of devices has no lock: no
// other thread may use that list meanwhile.
ggml_backend_dev_t ggml_backend_hobbit_register(ggml_backend_dev_t compute);

// The buffer type of one model's routed experts, or of those that this device computes: addresses without memory.
ggml_backend_buffer_type ggml_backend_hobbit_make_buffer_type(hobbit::split_runner * runner, ggml_backend_dev_t device);

// Returns true if its tensors stay on disk.
bool ggml_backend_buft_is_hobbit(ggml_backend_buffer_type_t buft);
