// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"
#include "predict/predictor.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <set>

namespace hobbit {

// Compares the experts that a predictor names one layer ahead with those that the layer then chooses. Predicted experts
// are not loaded. Without a predictor it does nothing.
class prediction_judge {
  public:
    // Fails for an unknown predictor and for one that needs more than routes.
    status open(const hobbit_simulation & options);

    // The layer's router has chosen; the counts go to `result`, and by layer to the options', if the layer is counted.
    void on_routing(const layer_routing & routing, bool is_counted, hobbit_simulation_result & result);

    // The layer's experts are loaded; the next layer is predicted.
    void look_ahead(const layer_routing & running, const std::function<bool(expert_id)> & is_resident);

  private:
    std::unique_ptr<predictor> judged_;           // null: none
    hobbit_layer_recall *      recall_ = nullptr; // [layer]; null: not wanted
    layer_id                   layer_;            // that is predicted
    std::set<uint32_t>         predicted_;
    std::set<uint32_t>         missing_; // missing ones of these
};

} // namespace hobbit
