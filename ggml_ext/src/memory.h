// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace hobbit {

// Memory that this process holds now.
uint64_t resident_memory();

// Memory that this process may still take without anything being swapped out or killed: the least of what the machine
// has available and what its memory cgroups (v1 or v2) leave.
uint64_t available_memory();

} // namespace hobbit
