// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "device/device-traits.h"
#include "ggml-backend-impl.h"
#include "graph/lazy-backend.h"
#include "model/expert.h"

#include <optional>
#include <string>
#include <vector>

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

//
// operations of llama.cpp's graphs that our backend takes
//

// Over experts, or over the token embedding, that a cache serves.
bool is_expert_matmul(const ggml_tensor * op);
bool is_row_lookup(const ggml_tensor * op);

// The expert matmul that the tensor is, or is made of by at most so many element-wise operations alone; null: none.
const ggml_tensor * find_matmul(const ggml_tensor * tensor, int depth = 8);

// Returns true if the backend of this device serves them.
bool is_of_device(const ggml_tensor * weights, ggml_backend_dev_t dev);

// Claiming what lies between its matmuls makes a layer one split. After the last matmul only what still belongs to
// single experts is claimed: its bias and its per-expert scale, not the weighting and the sum.
bool is_between_matmuls(const ggml_tensor * op, ggml_backend_dev_t dev);

} // namespace hobbit

// The backend's device that computes on `compute`, registered with ggml once per process. A process that opens no model
// with a cache never sees the backend. May be called from any thread, but ggml's own list of devices has no lock: no
// other thread may use that list meanwhile.
ggml_backend_dev_t ggml_backend_hobbit_register(ggml_backend_dev_t compute);

// The buffer type of one model's routed experts, or of those that this device computes: addresses without memory.
ggml_backend_buffer_type ggml_backend_hobbit_make_buffer_type(hobbit::split_runner * runner, ggml_backend_dev_t device);

// Returns true if its tensors stay on disk.
bool ggml_backend_buft_is_hobbit(ggml_backend_buffer_type_t buft);

// Computes on the device, and on the CPU if the CPU computes a share beside it.
struct ggml_backend_hobbit_context {
    hobbit::lazy_backend                compute;
    std::optional<hobbit::lazy_backend> cpu;    // computes a share beside devices with memory of their own
    std::vector<ggml_backend_t>         others; // work in memory that this one reads in place, in queues of their own

    explicit ggml_backend_hobbit_context(ggml_backend_dev_t device) : compute(device) {
        if (!hobbit::is_host_device(device)) {
            cpu.emplace(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
        }
    }
};

// Null: the backend is none of ours.
ggml_backend_hobbit_context * ggml_backend_hobbit_context_of(ggml_backend_t backend);
