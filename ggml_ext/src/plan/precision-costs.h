// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "model/expert.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Quality costs of low precision and of skipping, by layer or by expert. A use with the normalised weight w adds about
// w^2 * cost to the divergence (in nats) of the token's predictions. Infinity: never. pyhobbit calibrate measures the
// costs. Thread-safety: none.
class precision_costs {
  public:
    // `low` and `skip` have one number per layer, or one per expert and layer: [layer * n_experts + expert].
    status set(std::vector<float> low, std::vector<float> skip, uint32_t n_layers, uint32_t n_experts);

    bool empty() const { return low_.empty(); }

    // REQUIRES: not empty
    double low(expert_id id) const { return low_[place(id)]; }
    double skip(expert_id id) const { return skip_[place(id)]; }

  private:
    size_t place(expert_id id) const { return size_t(id.layer) * n_per_layer_ + (n_per_layer_ > 1 ? id.expert : 0); }

    std::vector<float> low_;
    std::vector<float> skip_;
    size_t             n_per_layer_ = 1;
};

} // namespace hobbit
