// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>

namespace hobbit {

// Outcome of an operation on the environment (files, memory, settings): success, or one sentence that says what failed
// and what to do about it. Programmer errors are GGML_ASSERTs instead.
class status {
  public:
    status() = default;

    static status error(std::string message) {
        status s;
        s.message_ = std::move(message);
        return s;
    }

    static status error(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

    // The caller asked to stop. Nothing is wrong, and the next try may succeed.
    static status aborted() {
        status s   = error("aborted");
        s.aborted_ = true;
        return s;
    }

    // The error with a number by which its callers tell it from others; 0: they need not. least: a size that would do.
    status because(int reason, uint64_t least = 0) && {
        reason_ = reason;
        least_  = least;
        return std::move(*this);
    }

    bool ok() const { return message_.empty(); }

    int      reason() const { return reason_; }
    uint64_t least() const { return least_; }

    bool is_aborted() const { return aborted_; }

    const std::string & message() const { return message_; }

  private:
    std::string message_;
    int         reason_  = 0;
    uint64_t    least_   = 0;
    bool        aborted_ = false;
};

// Leaves the function with the error of an expression that is a status, if it is one.
#define HOBBIT_TRY(expression)                                                                                         \
    do {                                                                                                               \
        const hobbit::status tried_ = (expression);                                                                    \
        if (!tried_.ok()) {                                                                                            \
            return tried_;                                                                                             \
        }                                                                                                              \
    } while (false)

// The error of what ended with an exception. Without memory, for std::bad_alloc above all, it is `no_memory`, which the
// caller made in time; every other exception is an internal error.
status error_of(const std::exception & e, status no_memory) noexcept;

// printf into a string
std::string format(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

// "1.5 GiB"
std::string format_size(double bytes);

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
