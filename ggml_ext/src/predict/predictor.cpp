// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

#include "base/name-table.h"
#include "predict/given-predictor.h"
#include "predict/path-predictor.h"
#include "predict/repeat-predictor.h"
#include "predict/router-predictor.h"

#include <algorithm>

namespace hobbit {

namespace {

template <typename T>
std::unique_ptr<predictor> make(const predictor_options & options) {
    return std::make_unique<T>(options);
}

template <size_t dictionary_size>
std::unique_ptr<predictor> make_paths(const predictor_options & options) {
    return std::make_unique<path_predictor>(options, dictionary_size);
}

struct named_predictor {
    const char * name;
    std::unique_ptr<predictor> (*make)(const predictor_options &);
};

const named_predictor predictors[] = {
    { "router", make<router_predictor> },    { "repeat", make<repeat_predictor> }, { "paths", make_paths<0> },
    { "paths-exact", make_paths<8u << 20> }, { "given", make<given_predictor> },
};

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

std::unique_ptr<predictor> make_predictor(const predictor_options & options) {
    return make_named(predictors, options.name, options);
}

const std::vector<std::string> & predictor_names() {
    static const std::vector<std::string> names = names_of(predictors);
    return names;
}

} // namespace hobbit
