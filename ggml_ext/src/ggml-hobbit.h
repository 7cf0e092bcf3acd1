// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend-impl.h"

struct hobbit_model;

// Registers the backend with ggml, once per process. A process that opens no model with a cache never sees the backend.
void ggml_backend_hobbit_register();

// The buffer type of one model's routed experts: addresses without memory, which only this backend computes with.
ggml_backend_buffer_type ggml_backend_hobbit_make_buffer_type(hobbit_model * model);
