// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"

#include <cstddef>
#include <exception>
#include <string>

namespace hobbit {

// Sets the result of hobbit_last_error. Thread-safe.
void set_last_error(const std::string & message);

// For functions of hobbit.h that can fail: writes an error to `err` and hobbit_last_error. Returns whether `s` is a
// success. Thread-safe.
bool report(const status & s, char * err, size_t err_size);

// The same for the status that `call` returns. An exception becomes an error: `what`, and its reason.
template <typename F>
bool report_call(const std::string & what, char * err, size_t err_size, F call) {
    status s;
    try {
        s = call();
    } catch (const std::exception & e) {
        s = status::error("%s: %s", what.c_str(), e.what());
    }
    return report(s, err, err_size);
}

} // namespace hobbit
