// SPDX-License-Identifier: MIT
#include "predict/predictor.h"

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
};

} // namespace

std::unique_ptr<predictor> make_predictor(const predictor_options & options) {
    for (const named_predictor & known : predictors) {
        if (options.name == known.name) {
            return known.make(options);
        }
    }
    return nullptr;
}

const std::vector<std::string> & predictor_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> all;
        for (const named_predictor & known : predictors) {
            all.push_back(known.name);
        }
        return all;
    }();
    return names;
}

} // namespace hobbit
