// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "model/expert.h"

#include <string>

namespace hobbit {

class inner_graph;

// The backend's interface to the model whose experts a split computes. It is the context of the model's buffer types.
//
// Ownership: counted. A buffer of the model's buffer types holds one reference. Thread-safety: ref, unref and the const
// methods may be called from any thread; the others take turns by themselves.
class split_runner {
  public:
    virtual void ref()   = 0;
    virtual void unref() = 0; // the last one deletes the object

    // Returns true if the tensor's data stays on disk.
    virtual bool owns(const std::string & tensor) const = 0;

    // A routed expert tensor under llama.cpp's name; null for any other name. Valid as long as the object.
    virtual const expert_tensor * find_tensor(const std::string & name) const = 0;

    // Runs a split of an outer graph that has matmuls over experts of this device of the backend's.
    // `cpu` computes the CPU's share; null where the CPU computes all.
    virtual status compute(ggml_cgraph * graph, ggml_backend_dev_t device, inner_graph & inner, inner_graph * cpu) = 0;

    // Runs a GET_ROWS over the token embedding. REQUIRES: owns() it.
    virtual status look_up(ggml_tensor * lookup) = 0;

  protected:
    ~split_runner() = default;
};

} // namespace hobbit
