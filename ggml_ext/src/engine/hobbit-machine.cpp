// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "base/system-memory.h"
#include "hobbit.h"
#include "io/disk-speed.h"

#include <exception>

using hobbit::status;

uint64_t hobbit_resident_memory(void) {
    return hobbit::resident_memory();
}

uint64_t hobbit_available_memory(void) {
    return hobbit::available_memory();
}

bool hobbit_measure_disk(const char * path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                         struct hobbit_disk_speed * speed, char * err, size_t err_size) {
    *speed = {};
    status s;
    try {
        s = hobbit::measure_disk(path, read_bytes, n_threads, seconds, *speed);
    } catch (const std::exception & e) {
        s = status::error("cannot measure the disk: %s", e.what());
    }
    return hobbit::report(s, err, err_size);
}
