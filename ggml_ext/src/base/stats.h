// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace hobbit {

// Counters since opening, meaning as in struct hobbit_stats. Written by the thread that computes and by the loader's,
// read by any.
struct stats {
    using counter = std::atomic<uint64_t>;

    std::array<counter, 2> selections = {}; // [tier]
    counter                selections_skipped{ 0 };
    std::array<counter, 2> hits      = {};
    std::array<counter, 2> misses    = {};
    std::array<counter, 2> host_hits = {}; // of the misses
    counter                evictions{ 0 };
    counter                bytes_read{ 0 };
    counter                bytes_transferred{ 0 };
    counter                layers_computed{ 0 };
    counter                waves{ 0 };
    counter                predicted{ 0 };
    counter                predicted_right{ 0 };
    counter                prefetched{ 0 };
    counter                prefetched_used{ 0 };
    counter                bytes_prefetched{ 0 };
    counter                prefetch_pauses{ 0 };
    std::atomic<bool>      prefetch_active{ false };
    counter                stall_ns{ 0 };
    counter                disk_demand_ns{ 0 };
    counter                compute_ns{ 0 };
    counter                transfer_ns{ 0 };
    counter                selections_cpu{ 0 };
    counter                selections_split{ 0 };
    counter                cpu_ns{ 0 };
    counter                layers_predicted{ 0 };
    counter                predicted_ns{ 0 };
    counter                measured_ns{ 0 };
};

} // namespace hobbit
