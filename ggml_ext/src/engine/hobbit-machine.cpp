// SPDX-License-Identifier: MIT
#include "base/last-error.h"
#include "base/memory-turn.h"
#include "base/system-memory.h"
#include "hobbit.h"
#include "io/disk-speed.h"

uint64_t hobbit_resident_memory(void) {
    return hobbit::resident_memory();
}

uint64_t hobbit_available_memory(void) {
    return hobbit::available_memory();
}

uint64_t hobbit_memory_limit(void) {
    return hobbit::memory_limit();
}

struct hobbit_memory_turn {
    std::shared_ptr<hobbit::memory_turn> turn;
};

hobbit_memory_turn * hobbit_take_turn(bool or_beside) {
    try {
        auto turn = hobbit::memory_turn::take(std::chrono::milliseconds(0), or_beside);
        return turn ? new hobbit_memory_turn{ std::move(turn) } : nullptr;
    } catch (const std::exception &) { // no memory for it
        return nullptr;
    }
}

void hobbit_end_turn(hobbit_memory_turn * turn) {
    delete turn;
}

bool hobbit_measure_disk(const char * path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                         struct hobbit_disk_speed * speed, char * err, size_t err_size) {
    *speed = {};
    return hobbit::report_call("cannot measure the disk", err, err_size,
                               [&] { return hobbit::measure_disk(path, read_bytes, n_threads, seconds, *speed); });
}
