// SPDX-License-Identifier: MIT
#pragma once

#include "hobbit.h"

#include <cstdint>
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
