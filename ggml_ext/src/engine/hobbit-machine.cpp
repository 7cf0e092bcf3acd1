// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "base/system-memory.h"
#include "hobbit.h"
#include "io/disk-speed.h"

uint64_t hobbit_resident_memory(void) {
    return hobbit::resident_memory();
}

uint64_t hobbit_available_memory(void) {
    return hobbit::available_memory();
}

bool hobbit_measure_disk(const char * path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                         struct hobbit_disk_speed * speed, char * err, size_t err_size) {
    *speed = {};
    return hobbit::report_call("cannot measure the disk", err, err_size,
                               [&] { return hobbit::measure_disk(path, read_bytes, n_threads, seconds, *speed); });
}
