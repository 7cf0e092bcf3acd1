// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "hobbit.h"
#include "policy/cache-policy.h"
#include "simulate/simulator.h"

#include <exception>

using hobbit::status;

const char * hobbit_policy_name(size_t i) {
    const auto & names = hobbit::policy_names();
    return i < names.size() ? names[i].c_str() : nullptr;
}

bool hobbit_simulate(const struct hobbit_route * routes, size_t n_routes, const struct hobbit_simulation * options,
                     struct hobbit_simulation_result * result, char * err, size_t err_size) {
    status s;
    try {
        s = hobbit::simulate(routes, n_routes, *options, *result);
    } catch (const std::exception & e) {
        *result = {};
        s       = status::error("cannot simulate: %s", e.what());
    }
    return hobbit::report(s, err, err_size);
}
