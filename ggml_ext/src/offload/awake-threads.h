// SPDX-License-Identifier: MIT
#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"

namespace hobbit {

// Threads that compute on the CPU wait actively for some milliseconds, and then sleep. To wake them takes longer than
// an expert on a machine of many cores: who computes there only now and then finds the CPU slow, and leaves it alone
// for good. Has them do next to nothing, so that they stay awake.
//
// Thread-safety: none.
class awake_threads {
  public:
    awake_threads();

    void keep(ggml_backend_t cpu);

  private:
    ggml_context_ptr        ctx_;
    ggml_cgraph *           graph_;  // in ctx_
    ggml_backend_buffer_ptr memory_; // null: nothing is done
};

} // namespace hobbit
