// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"

#include <cstddef>

namespace hobbit {

// The policy name of the offline bound: it keeps what is needed soonest and counted, and no policy does better.
extern const char * const BELADY;

// Replays recorded routes, one token at a time, through the parts of the engine: plan_layer decides what serves each
// selection, a resident_set per tier over one cache_policy decides what is kept. As in the engine, the experts of the
// layer in hand keep their slots; a miss that finds none is served without being kept. Options and routes are checked
// first: on an error the result is all zeros.
//
// The policy knows a sequence by a number that is free again when the sequence has ended, like a server's slots.
//
// Pure. The same options and routes give the same result.
status simulate(const hobbit_route * routes, size_t n_routes, const hobbit_simulation & options,
                hobbit_simulation_result & result);

} // namespace hobbit
