// SPDX-License-Identifier: MIT
#include "base/status.h"

#include <cstdarg>
#include <cstdio>
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

} // namespace hobbit
