// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "engine/settings.h"
#include "hobbit.h"
#include "plan/memory-budget.h"
#include "policy/cache-policy.h"
#include "simulate/simulator.h"

#include <algorithm>

using namespace hobbit;

const char * hobbit_policy_name(size_t i) {
    const auto & names = policy_names();
    return i < names.size() ? names[i].c_str() : nullptr;
}

// Checks the settings of a simulation as those of a model that is opened.
static status check_settings(const hobbit_simulation & o) {
    const auto number = [](const char * key, double value) {
        return hobbit_setting{ key, HOBBIT_SETTING_FLOAT, 0, value, nullptr };
    };
    const auto text = [](const char * key, const char * value) {
        return hobbit_setting{ key, HOBBIT_SETTING_STRING, 0, 0.0, value };
    };
    std::vector<hobbit_setting> given  = { text("hobbit.rule", o.rule), number("hobbit.t1", o.t1),
                                           number("hobbit.t2", o.t2), number("hobbit.price", o.price) };
    const std::string           policy = o.policy ? o.policy : "";
    if (policy != BELADY) {
        given.push_back(text("hobbit.policy", o.policy));
    }
    if (policy == "hobbit") {
        const char * const keys[] = { "hobbit.w_lru", "hobbit.w_lfu", "hobbit.w_lhu", "hobbit.w_fld" };
        for (size_t i = 0; i < 4; i++) {
            given.push_back(number(keys[i], o.weights[i]));
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
