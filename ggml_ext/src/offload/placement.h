// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <vector>

namespace hobbit {

// What the CPU computes of the experts that are not on the device.
enum class compute_mode {
    gpu,         // none of them
    cooperative, // all of them
    automatic,   // what takes the least time in this layer and those to come
};

// Who computes an expert of a layer.
enum class computed_by : uint8_t {
    device,
    cpu,   // where its weights lie in host memory
    split, // the CPU all but the last product, which the device makes of what the CPU hands over
};

// Who computes which expert of a layer (Twiddler's Algorithm 1, for two that work at the same time).
//
// The cost model. For one layer and batch each expert runs once, for all its tokens:
//   by the CPU     for cpu_start + cpu_per_token * n_tokens, one expert after the other;
//   by the device  for `device`, the same for all of a kind, one after the other. What is not there comes over the
//                  link before, for `transfer`, one after the other.
// Of an expert that is split the device has, and the link brings, the share `down`, and the CPU the rest.
// CPU, device and link work at the same time; what was brought, or handed over, last is still to be computed then (the
// CPU begins with what it hands over, so that this is too much where it has others; it is short):
//   max(sum of the CPU's + the longest `device` of an expert split,
//       sum of the device's,
//       sum of transfers + the longest `device` of an expert brought)
// What must be read from disk is read for either of them, and is in no latency. The CPU does its share in pieces: what
// arrives on the device meanwhile is begun after the piece in hand.
//
// What the CPU computes, if only in part, bypasses the device, which may then miss it for later tokens: `bypass`.

// Of experts that are alike: of one type and shape. Seconds, none of them negative.
struct expert_costs {
    double cpu_start;
    double cpu_per_token;
    double device;
    double transfer;
    double down   = 0.0; // share of the work and the bytes that the last product has; 0: it cannot be split
    double bypass = 0.0; // what it takes later that an expert does not come to the device

    double cpu(uint32_t n_tokens) const { return cpu_start + cpu_per_token * n_tokens; }

    bool can_split() const { return down > 0.0 && down < 1.0; }
};

// An expert that a layer needs.
struct expert_work {
    uint32_t kind;
    uint32_t n_tokens;
    bool     is_present; // on the device
};

using placed_experts = std::vector<computed_by>;

// What the layer takes where the experts are so placed.
double layer_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                     const placed_experts & placed);

// What layers to come take for it.
double bypass_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                      const placed_experts & placed);

// What is present stays with the device, the others are placed so that no other choice takes less time, now and later
// (layer_seconds + bypass_seconds); with may_split at most one is split, which evens out what whole experts leave
// uneven. Of a kind the CPU has those with the fewest tokens, then comes the one that is split, so that numbers are all
// there is to choose: exact, and quick for the few kinds that a layer has.
placed_experts place_experts(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                             bool may_split);

} // namespace hobbit
