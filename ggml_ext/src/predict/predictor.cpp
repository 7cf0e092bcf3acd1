// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

#include "predict/given-predictor.h"
#include "predict/repeat-predictor.h"

#include <algorithm>

namespace hobbit {

namespace {

const auto repeat = registered_predictor::of<repeat_predictor>("repeat", { "names the previous token's experts" });
const auto given  = registered_predictor::of<given_predictor>("given", { "takes those of hobbit_set_prediction" });

} // namespace

void normalize(layer_routing & routing) {
    routing.weights.resize(routing.experts.size(), 1.0f); // equal ones where they are not known
    const size_t        n_used = size_t(routing.n_used);
    std::vector<double> normalized(n_used);
    for (size_t i = 0; i < routing.weights.size(); i += n_used) {
        normalize_weights(&routing.weights[i], n_used, normalized.data());
        std::copy(normalized.begin(), normalized.end(), routing.weights.begin() + ptrdiff_t(i));
    }
}

} // namespace hobbit
