// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstddef>
#include <string>

namespace hobbit {

// Sets the result of hobbit_last_error. Thread-safe.
void set_last_error(const std::string & message);

// For functions of hobbit.h that can fail: writes an error to `err` and hobbit_last_error. Returns whether `s` is a
// success. Thread-safe.
bool report(const status & s, char * err, size_t err_size);

} // namespace hobbit
