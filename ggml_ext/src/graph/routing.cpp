// SPDX-License-Identifier: MIT
#include "graph/routing.h"

#include "ggml-backend.h"

#include <cstring>
#include <vector>

namespace hobbit {

// The tensor's bytes, from the device's memory.
static std::vector<char> fetch(const ggml_tensor * tensor) {
    std::vector<char> bytes(ggml_nbytes(tensor));
    ggml_backend_tensor_get(tensor, bytes.data(), 0, bytes.size());
    return bytes;
}

status read_routing(const ggml_tensor * matmul, layer_id layer, layer_routing & routing, inner_graph & inner) {
    const ggml_tensor *     ids       = matmul->src[2];
    const std::vector<char> raw       = fetch(ids);
    const int32_t           n_experts = int32_t(matmul->src[0]->ne[2]);
    inner.count_copy(raw.size());
    routing.layer    = layer;
    routing.n_used   = ids->ne[0];
    routing.n_tokens = ids->ne[1];
    for (int64_t t = 0; t < routing.n_tokens; t++) {
        for (int64_t k = 0; k < routing.n_used; k++) {
            int32_t id;
            std::memcpy(&id, raw.data() + t * ids->nb[1] + k * ids->nb[0], sizeof(id));
            if (id < 0 || id >= n_experts) {
                return status::error("the router chose expert %d of %d in '%s': the device that computed it "
                                     "is lost or broken",
                                     id, n_experts, matmul->src[0]->name);
            }
            routing.experts.push_back(id);
        }
    }

    const ggml_tensor * weights = matmul->src[3];
    if (weights && ggml_is_contiguous(weights) && size_t(ggml_nelements(weights)) == routing.experts.size()) {
        routing.weights.resize(routing.experts.size());
        ggml_backend_tensor_get(weights, routing.weights.data(), 0, routing.weights.size() * sizeof(float));
        inner.count_copy(routing.weights.size() * sizeof(float));
    }
    return {};
}

} // namespace hobbit
