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
    tier_id      base; // the tier under llama.cpp's own names
    const char * high; // kind of the high tier

    // Fails if the file at `path` lacks what the other tier must have.
    status (*check)(const expert_index & index, const std::string & path);

    // See serving.
    precision (*served)(const expert_index & index, expert_id id, precision given) = nullptr;
};

struct format_options {
    std::string name;
};

// A format's name is its number in hobbit.version.
using registered_format = registered<tier_format, format_options>;

} // namespace hobbit
