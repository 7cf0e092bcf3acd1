// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <string>

namespace hobbit {

// Raises the process's soft limit of open files so that `n` more can be opened, as far as its hard limit allows.
void allow_open_files(uint64_t n);

// The reason `error` (of errno) why a file could not be opened, and what helps against too many open files.
std::string open_failure(int error);

} // namespace hobbit
