// SPDX-License-Identifier: MIT
#include "base/last-error.h"

#include "hobbit.h"

#include <cstdio>
#include <mutex>

static std::mutex  g_error_mutex;
static std::string g_error; // guarded by g_error_mutex

void hobbit::set_last_error(const std::string & message) {
    std::lock_guard<std::mutex> lock(g_error_mutex);
    g_error = message;
}

bool hobbit::report(const status & s, char * err, size_t err_size) {
    if (!s.ok()) {
        set_last_error(s.message());
        snprintf(err, err_size, "%s", s.message().c_str());
    }
    return s.ok();
}

size_t hobbit_last_error(char * err, size_t err_size) {
    std::lock_guard<std::mutex> lock(g_error_mutex);
    snprintf(err, err_size, "%s", g_error.c_str());
    return g_error.size();
}

void hobbit_clear_last_error(void) {
    hobbit::set_last_error("");
}
