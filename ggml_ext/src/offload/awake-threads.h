// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace hobbit {

// Keeps OpenMP's threads spinning with a no-op graph. Idle threads sleep after some milliseconds, and waking them takes
// longer than an expert on a machine with many cores. The cost model would find the CPU slow and never use it again.
//
// Thread-safety: none.
class awake_threads {
  public:
    awake_threads();

    void keep(ggml_backend_t cpu);

  private:
    ggml_context_ptr        ctx_;
    ggml_cgraph *           graph_;  // in ctx_
    ggml_backend_buffer_ptr memory_; // null: keep() does nothing
};

} // namespace hobbit
