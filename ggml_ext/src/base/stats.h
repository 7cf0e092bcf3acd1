// SPDX-License-Identifier: MIT
#pragma once

#include "base/id-array.h"
#include "base/timeline.h"
#include "hobbit.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

// Every counter, once: its field, its metric and its help. A new one needs a line here, and one where it is counted.
//   TIERS(field, help)          one counter for each precision: FIELD_high and FIELD_low
//   COUNT(field, metric, label, help)
//   SECONDS(field, metric, help) FIELD_s; counted in nanoseconds, as FIELD_ns
//   STATE(field, metric, help)  1 or 0
//
// A selection is one (token, expert) pair chosen by a router. Hits and misses count the experts that a layer needed for
// one batch, once each.
#define HOBBIT_COUNTERS(TIERS, COUNT, SECONDS, STATE)                                                                  \
    TIERS(selections, "Expert selections (token, expert) by the precision that served them")                           \
    COUNT(selections_skipped, "selections_total", "precision=\"skipped\"", "Expert selections that were skipped")      \
    TIERS(hits, "Experts that a layer needed for a batch and found in the cache")                                      \
    TIERS(misses, "Experts that a layer needed for a batch and did not find in the cache")                             \
    TIERS(host_hits, "Misses of a GPU's cache that were found in host memory; the others were read from disk")         \
    COUNT(evictions, "evictions_total", nullptr, "Experts evicted")                                                    \
    COUNT(reads, "reads_total", nullptr, "Reads of expert data from disk; bytes_read / reads is their mean size")      \
    COUNT(bytes_read, "read_bytes_total", nullptr, "Bytes of experts read from disk")                                  \
    COUNT(bytes_transferred, "transferred_bytes_total", nullptr, "Bytes of experts uploaded to GPUs")                  \
    COUNT(layers_computed, "layers_computed_total", nullptr, "Layers with routed experts computed, once per batch")    \
    COUNT(waves, "waves_total", nullptr,                                                                               \
          "Passes over these layers; more than one per layer where its experts did not fit in the cache")              \
    COUNT(predicted, "predicted_experts_total", nullptr, "Experts predicted for a later layer")                        \
    COUNT(predicted_right, "predicted_right_total", nullptr, "Predicted experts that the layer then used")             \
    COUNT(prefetched, "prefetched_experts_total", nullptr, "Experts requested before their layer ran")                 \
    COUNT(prefetched_used, "prefetched_used_total", nullptr, "Prefetched experts that the layer then used")            \
    COUNT(bytes_prefetched, "prefetched_bytes_total", nullptr, "Bytes read by prefetch, part of bytes_read")           \
    COUNT(prefetch_pauses, "prefetch_pauses_total", nullptr, "Times that prefetch was paused because it did not pay")  \
    STATE(prefetch_active, "prefetch_active", "1 while prefetch is on, 0 while it is paused or off")                   \
    SECONDS(stall, "stall_seconds_total", "Time that computation waited for the disk or for an upload")                \
    SECONDS(compute, "compute_seconds_total", "Time in layers with routed experts, stalls included")                   \
    SECONDS(transfer, "transfer_seconds_total", "Time with uploads to GPUs in flight")                                 \
    COUNT(device_launches, "device_launches_total", nullptr, "Graphs started on the devices that compute experts")     \
    COUNT(device_waits, "device_waits_total", nullptr, "Times that the CPU waited for such graphs")                    \
    COUNT(device_reads, "device_reads_total", nullptr, "Times that the CPU waited for bytes from these devices")       \
    COUNT(device_copies, "device_copies_total", nullptr,                                                               \
          "Copies of rows and indices to and from these devices, without experts and prefetch")                        \
    COUNT(device_copied_bytes, "device_copied_bytes_total", nullptr, "Bytes of these copies")                          \
    COUNT(selections_cpu, "cpu_selections_total", nullptr, "Expert selections that the CPU computed beside a GPU")     \
    SECONDS(cpu, "cpu_seconds_total", "Time that the CPU took for its selections, copies included")

namespace hobbit {

enum class tier_id : uint32_t;

// Adds a counter of a mechanism, a whole number that grows; stats::of has its value. The table lists these counters
// last, by name. Returns true, for initializers of static objects.
bool register_counter(const char * name, const char * metric, const char * help);

// Counters since opening, and where time goes if a timeline is open. Written by the thread that computes and by the
// loader's, read by any.
struct stats {
    using counter = std::atomic<uint64_t>;

#define HOBBIT_TIERS(field, help) id_array<tier_id, counter, 2> field = {};
#define HOBBIT_COUNT_(field, metric, label, help) counter field{ 0 };
#define HOBBIT_SECONDS_(field, metric, help) counter field##_ns{ 0 };
#define HOBBIT_STATE_(field, metric, help) std::atomic<bool> field{ false };
    HOBBIT_COUNTERS(HOBBIT_TIERS, HOBBIT_COUNT_, HOBBIT_SECONDS_, HOBBIT_STATE_)
#undef HOBBIT_TIERS
#undef HOBBIT_COUNT_
#undef HOBBIT_SECONDS_
#undef HOBBIT_STATE_

    // Experts that a layer needed for a batch, once each, in both precisions together.
    struct layer_uses {
        counter hits{ 0 };
        counter misses{ 0 };
    };

    // A mechanism's counter. REQUIRES: registered before the object was constructed
    counter & of(const char * name) { return own.at(name); }

    std::map<std::string, counter> own = zeros(); // [name]

    std::vector<layer_uses> layers; // sized before anything is computed, and not after; empty: not counted

    timeline events;

    // The value of the i-th counter of hobbit_counter_at; REQUIRES: there is one
    double value(size_t i) const;

  private:
    static std::map<std::string, counter> zeros();
};

} // namespace hobbit
