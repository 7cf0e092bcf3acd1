// SPDX-License-Identifier: MIT
#pragma once

#include "offload/cpu-rows.h"

namespace hobbit {

// Rows that were computed before their layer runs, which the CPU's share takes instead of computing them. They are of
// layers that run for a single token.
class row_source {
  public:
    virtual ~row_source() = default;

    // How a layer computes its rows. The section has all parts of the layer, and the CPU can share it.
    virtual void learn(const layer_section & section, layer_id layer) = 0;

    // The rows for the layer that begins; null: there are none.
    virtual const cpu_rows * rows() = 0;

    // So many uses of the layer took their rows from rows().
    virtual void took(size_t n_uses) = 0;
};

} // namespace hobbit
