// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstddef>
#include <string>

namespace hobbit {

// What hobbit_last_error returns from now on. Thread-safe.
void set_last_error(const std::string & message);

// For functions of hobbit.h that can fail: an error goes to `err` and to hobbit_last_error. True where it is a success.
// Thread-safe.
bool report(const status & s, char * err, size_t err_size);

} // namespace hobbit
