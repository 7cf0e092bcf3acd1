// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"
#include "simulator.h"

#include <cstdint>
#include <doctest/doctest.h>
#include <string>
#include <vector>

using route_list = std::vector<hobbit_route>;

inline hobbit_simulation options(const char * policy, uint32_t n_layers, uint32_t n_experts, uint32_t n_used,
                                 uint32_t slots_high, uint32_t slots_low = 0) {
    hobbit_simulation o = {};
    o.policy            = policy;
    o.weights[0]        = 1.0;
    o.n_layers          = n_layers;
    o.n_experts         = n_experts;
    o.n_used            = n_used;
    o.slots_high        = slots_high;
    o.slots_low         = slots_low;
    o.t1 = o.t2 = 1.0;
    o.bits_high = 16.0;
    o.bits_low  = 4.0;
    return o;
}

// One expert per token, in one layer; capital letters are counted.
inline route_list letters(const std::string & text, int32_t sequence = 0, int32_t first_token = 0) {
    route_list routes;
    for (const char c : text) {
        const bool counted = c < 'a';
        routes.push_back({ sequence, first_token++, 0, counted ? c - 'A' : c - 'a', 1.0f, counted });
    }
    return routes;
}

inline route_list operator+(route_list a, const route_list & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

inline bool contains(const std::string & text, const std::string & part) {
    return text.find(part) != std::string::npos;
}

inline hobbit_simulation_result run(const route_list & routes, const hobbit_simulation & o) {
    hobbit_simulation_result result;
    const hobbit::status     s = hobbit::simulate(routes.data(), routes.size(), o, result);
    REQUIRE_MESSAGE(s.ok(), s.message());
    return result;
}

// Tokens of three experts, ranked as given, with the weights 0.5, 0.3, 0.2: at t1 = 0.4 and t2 = 0.7 the first one
// is worth high precision (score 0), the second one low (0.5), the third one nothing (0.8).
inline route_list ranked(const std::vector<std::vector<int32_t>> & tokens) {
    route_list routes;
    for (size_t t = 0; t < tokens.size(); t++) {
        const float weights[] = { 0.5f, 0.3f, 0.2f };
        for (size_t i = 0; i < 3; i++) {
            routes.push_back({ 0, int32_t(t), 0, tokens[t][i], weights[i], 1 });
        }
    }
    return routes;
}

inline hobbit_simulation mixed(uint32_t slots_high, uint32_t slots_low) {
    hobbit_simulation o = options("lru", 1, 8, 3, slots_high, slots_low);
    o.t1                = 0.4;
    o.t2                = 0.7;
    return o;
}
