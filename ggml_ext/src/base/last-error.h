// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

namespace hobbit {

// Sets the result of hobbit_last_error. Thread-safe.
void set_last_error(const std::string & message);

// Writes a sentence to `err` and hobbit_last_error; where memory is too short to keep it, to `err` alone. Returns
// false.
bool report(const char * message, char * err, size_t err_size) noexcept;

// Reports the error that `call` returns, or `what` with the reason of what it throws, for functions of hobbit.h.
// Returns true if there was none. Thread-safe.
template <typename F>
bool report_call(const char * what, char * err, size_t err_size, F call) noexcept {
    try {
        const status s = call();
        return s.ok() || report(s.message().c_str(), err, err_size);
    } catch (const std::exception & e) {
        char message[256];
        snprintf(message, sizeof(message), "%s: %s", what, e.what());
        return report(message, err, err_size);
    }
}

} // namespace hobbit
