// SPDX-License-Identifier: MIT
#pragma once

#include <string>

namespace hobbit {

// What hobbit_last_error returns from now on. Thread-safe.
void set_last_error(const std::string & message);

} // namespace hobbit
