// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

#include "base/name-table.h"
#include "predict/given-predictor.h"
#include "predict/repeat-predictor.h"
#include "predict/router-predictor.h"

namespace hobbit {

namespace {

template <typename T>
std::unique_ptr<predictor> make(const predictor_options & options) {
    return std::make_unique<T>(options);
}

struct named_predictor {
    const char * name;
    std::unique_ptr<predictor> (*make)(const predictor_options &);
};

const named_predictor predictors[] = {
    { "router", make<router_predictor> },
    { "repeat", make<repeat_predictor> },
    { "given", make<given_predictor> },
};

} // namespace

std::unique_ptr<predictor> make_predictor(const predictor_options & options) {
    return make_named(predictors, options.name, options);
}

const std::vector<std::string> & predictor_names() {
    static const std::vector<std::string> names = names_of(predictors);
    return names;
}

} // namespace hobbit
