// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <vector>

namespace hobbit {

// What the CPU computes of the experts that are not on the device.
enum class compute_mode {
    gpu,         // none of them
    cooperative, // all of them
    automatic,   // what makes the layer end first
};

// Who computes which expert of a layer: the device, or the CPU where the expert's weights lie in host memory
// (Twiddler's Algorithm 1, for two that work at the same time).
//
// The cost model. For one layer and batch each expert runs once, for all its tokens:
//   by the CPU     for cpu_start + cpu_per_token * n_tokens, one expert after the other;
//   by the device  for `device`, the same for all of a kind, one after the other. What is not there comes over the
//                  link before, for `transfer`, one after the other.
// CPU, device and link work at the same time, and what was brought last is still to be computed: the layer takes
//   max(sum of the CPU's, sum of the device's, sum of transfers + the longest `device` of an expert brought)
// What must be read from disk is read for either of them, and is in no latency. The CPU does its share in pieces: what
// arrives on the device meanwhile is begun after the piece in hand.

// Of experts that are alike: of one type and shape. Seconds, none of them negative.
struct expert_costs {
    double cpu_start;
    double cpu_per_token;
    double device;
    double transfer;

    double cpu(uint32_t n_tokens) const { return cpu_start + cpu_per_token * n_tokens; }
};

// An expert that a layer needs.
struct expert_work {
    uint32_t kind;
    uint32_t n_tokens;
    bool     is_present; // on the device
};

// What the layer takes where the CPU computes those of on_cpu.
double layer_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                     const std::vector<bool> & on_cpu);

// For each expert whether the CPU computes it: what is present stays with the device, the others are shared so that no
// other choice takes less time. Of a kind the CPU has those with the fewest tokens, so that numbers are all there is to
// choose: exact, and quick for the few kinds that a layer has.
std::vector<bool> place_experts(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work);

} // namespace hobbit
