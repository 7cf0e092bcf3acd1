// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "hobbit.h"
#include "policy/cache-policy.h"
#include "simulate/simulator.h"

const char * hobbit_policy_name(size_t i) {
    const auto & names = hobbit::policy_names();
    return i < names.size() ? names[i].c_str() : nullptr;
}

bool hobbit_simulate(const struct hobbit_route * routes, size_t n_routes, const struct hobbit_simulation * options,
                     struct hobbit_simulation_result * result, char * err, size_t err_size) {
    return hobbit::report_call("cannot simulate", err, err_size,
                               [&] { return hobbit::simulate(routes, n_routes, *options, *result); });
}
