// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml-backend.h"
#include "model/expert-shapes.h"
#include "offload/cost-model.h"

#include <vector>

namespace hobbit {

// The seeds of the cost model: the latency of each kind on the CPU and on the device, and the link's bandwidth. They
// are measured on temporary memory of the size of one expert. Uploads are measured from `transfer_memory`.
struct measured_latencies {
    std::vector<cost_model::kind_seed> kinds;
    double                             transfer_per_byte = 0.0;
};

status measure_latencies(const expert_shapes & kinds, ggml_backend_dev_t device,
                         ggml_backend_buffer_type_t transfer_memory, measured_latencies & found);

} // namespace hobbit
