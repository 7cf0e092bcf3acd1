// SPDX-License-Identifier: MIT
#include "base/status.h"

#include "base/thread-annotations.h"
#include "hobbit.h"

#include <cstdarg>
#include <new>

namespace hobbit {

static std::string format_list(const char * fmt, va_list args) {
    va_list again;
    va_copy(again, args);
    const int   size = vsnprintf(nullptr, 0, fmt, args);
    std::string text(size > 0 ? size : 0, '\0');
    vsnprintf(text.data(), text.size() + 1, fmt, again);
    va_end(again);
    return text;
}

std::string format(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const std::string text = format_list(fmt, args);
    va_end(args);
    return text;
}

status status::error(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const status s = error(format_list(fmt, args));
    va_end(args);
    return s;
}

status error_of(const std::exception & e, status no_memory) noexcept {
    if (!dynamic_cast<const std::bad_alloc *>(&e)) {
        try {
            return status::error("internal error: %s; open the model again, and report it", e.what());
        } catch (const std::bad_alloc &) {
            // no memory for the text either
        }
    }
    return no_memory;
}

std::string format_size(double bytes) {
    if (bytes >= 1024.0 * 1024.0 * 1024.0) {
        return format("%.2f GiB", bytes / (1024.0 * 1024.0 * 1024.0));
    }
    if (bytes >= 1024.0 * 1024.0) {
        return format("%.1f MiB", bytes / (1024.0 * 1024.0));
    }
    return format("%.1f KiB", bytes / 1024.0);
}

static mutex               g_error_mutex;
static std::string g_error GUARDED_BY(g_error_mutex);

void set_last_error(const std::string & message) {
    mutex_lock lock(g_error_mutex);
    g_error = message;
}

bool report(const char * message, char * err, size_t err_size) noexcept {
    snprintf(err, err_size, "%s", message);
    try {
        set_last_error(message);
    } catch (const std::exception &) {
        // the caller has it
    }
    return false;
}

} // namespace hobbit

size_t hobbit_last_error(char * err, size_t err_size) {
    hobbit::mutex_lock lock(hobbit::g_error_mutex);
    snprintf(err, err_size, "%s", hobbit::g_error.c_str());
    return hobbit::g_error.size();
}

void hobbit_clear_last_error(void) {
    hobbit::set_last_error("");
}
