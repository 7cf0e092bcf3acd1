// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "hobbit.h"

#include <cstdint>
#include <string>

namespace hobbit {

// As hobbit_measure_disk.
status measure_disk(const std::string & path, uint64_t read_bytes, uint32_t n_threads, double seconds,
                    hobbit_disk_speed & speed);

} // namespace hobbit
