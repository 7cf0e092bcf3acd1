// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "base/status.h"
#include "model/expert.h"

#include <string>

namespace hobbit {

class expert_index;

// A version of the format of files with two tiers: what such a file says of them, and what it must have.
struct tier_format {
    tier_id      base = tier_id::high; // the tier under llama.cpp's own names
    const char * high = "";            // kind of the high tier

    // Fails if the file at `path` lacks what the other tier must have; null: the version is not known.
    status (*check)(const expert_index & index, const std::string & path) = nullptr;

    // See serving.
    precision (*served)(const expert_index & index, expert_id id, precision given) = nullptr;
};

// A format's name is its number in hobbit.version. It makes no objects: its traits are all.
using registered_format = registered<void, no_traits, tier_format>;

} // namespace hobbit
