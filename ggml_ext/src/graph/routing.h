// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "ggml.h"
#include "plan/layer-plan.h"

#include <cstdint>

namespace hobbit {

// A layer's routing as an outer graph has it. Thread-safety: different graphs may be used at once.

// The experts that the router chose for a MUL_MAT_ID over experts, and the weights in its src[3]; none where that is
// not there, or not as expected. Fails where the ids are no experts.
status read_routing(const ggml_tensor * matmul, layer_id layer, layer_routing & routing);

} // namespace hobbit
