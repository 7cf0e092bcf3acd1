// SPDX-License-Identifier: MIT
#include "base/last-error.h"

#include "base/thread-annotations.h"
#include "hobbit.h"

#include <cstdio>

static hobbit::mutex       g_error_mutex;
static std::string g_error GUARDED_BY(g_error_mutex);

void hobbit::set_last_error(const std::string & message) {
    mutex_lock lock(g_error_mutex);
    g_error = message;
}

bool hobbit::report(const char * message, char * err, size_t err_size) noexcept {
    snprintf(err, err_size, "%s", message);
    try {
        set_last_error(message);
    } catch (const std::exception &) {
        // the caller has it
    }
    return false;
}

size_t hobbit_last_error(char * err, size_t err_size) {
    hobbit::mutex_lock lock(g_error_mutex);
    snprintf(err, err_size, "%s", g_error.c_str());
    return g_error.size();
}

void hobbit_clear_last_error(void) {
    hobbit::set_last_error("");
}
