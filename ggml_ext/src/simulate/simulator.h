// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit-simulation.h"

#include <cstddef>

namespace hobbit {

// The policy name of the offline bound, Belady's algorithm: it knows all later uses, and no policy has more hits.
constexpr const char * BELADY = "belady";

// Replays recorded routes, batch by batch, through the parts of the engine: layer_step plans and counts, and a
// resident_set per tier evicts by one cache_policy. As in the engine, the running layer's experts keep their slots, and
// a miss that finds no slot is served without becoming resident. Invalid sizes or routes are an error and leave the
// result all zeros.
//
// The policy knows each sequence by a number, which another sequence gets after its end, like a server's slots.
//
// Pure: the same options and routes give the same result. REQUIRES: settings that the engine takes, see hobbit_simulate
status simulate(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options,
                hobbit_simulation_result & result);

} // namespace hobbit
