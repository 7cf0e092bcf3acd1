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
// success. Thread-safe. Where memory is too short to keep the error, it is only written.
bool report(const status & s, char * err, size_t err_size) noexcept;

// For an exception: writes and keeps `what` and its reason. Returns false.
bool report_exception(const char * what, const std::exception & e, char * err, size_t err_size) noexcept;

// The same for what `call` returns or throws.
template <typename F>
bool report_call(const char * what, char * err, size_t err_size, F call) noexcept {
    try {
        return report(call(), err, err_size);
    } catch (const std::exception & e) {
        return report_exception(what, e, err, err_size);
    }
}

} // namespace hobbit
