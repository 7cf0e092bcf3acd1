// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "status.h"

#include <string>

namespace hobbit {

// The devices that experts are computed on. Thread-safety: as ggml's registry, which opening a model with a further
// device changes.

// The device of that name, empty for the CPU; an error names those there are.
status find_compute_device(const std::string & name, ggml_backend_dev_t & device);

// Whether the device computes in host memory: what lies there is used in place.
bool is_host_device(ggml_backend_dev_t device);
} // namespace hobbit
