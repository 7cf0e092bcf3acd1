// SPDX-License-Identifier: MIT
#include "base/status.h"
#include "engine/settings.h"
#include "hobbit-simulation.h"
#include "plan/memory-budget.h"
#include "simulate/simulator.h"

using namespace hobbit;

// Checks the settings of a simulation as those of a model that is opened.
static status check_settings(const hobbit_simulation & o) {
    std::vector<hobbit_setting> given  = { { "hobbit.rule", 0.0, o.rule },
                                           { "hobbit.t1", o.t1, nullptr },
                                           { "hobbit.t2", o.t2, nullptr },
                                           { "hobbit.price", o.price, nullptr } };
    const std::string           policy = o.policy ? o.policy : "";
    if (policy != BELADY) {
        given.push_back({ "hobbit.policy", 0.0, o.policy });
    }
    if (policy == "hobbit") {
        const char * const keys[] = { "hobbit.w_lru", "hobbit.w_lfu", "hobbit.w_lhu", "hobbit.w_fld" };
        for (size_t i = 0; i < 4; i++) {
            given.push_back({ keys[i], o.weights[i], nullptr });
        }
    }
    return settings().apply(given.data(), given.size());
}

bool hobbit_simulate(const struct hobbit_route * routes, size_t n_routes, const struct hobbit_simulation * options,
                     struct hobbit_simulation_result * result, char * err, size_t err_size) {
    *result = {};
    return report_call("cannot simulate", err, err_size, [&] {
        const status s = check_settings(*options);
        return s.ok() ? simulate(routes, n_routes, *options, *result) : s;
    });
}

void hobbit_divide_pools(const struct hobbit_pool_request * request, uint32_t * high, uint32_t * low) {
    budget b;
    b.low_share  = request->low_share;
    b.low_demand = request->low_demand;
    pool_demand demand;
    demand.slot_size = { request->high_bytes, request->low_bytes };
    demand.n_experts = request->n_experts;
    demand.n_used    = request->n_used;

    const pool_slots slots = divide_pools(b, demand, request->bytes);
    *high                  = slots[tier_id::high];
    *low                   = slots[tier_id::low];
}
