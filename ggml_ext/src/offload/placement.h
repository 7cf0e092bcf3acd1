// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <vector>

namespace hobbit {

// What happens on a miss of the device's cache.
enum class compute_mode {
    gpu,         // the expert is uploaded
    cooperative, // the CPU computes the expert
    automatic,   // the faster one, for this layer and later ones
};

// Who computes an expert of a layer.
enum class computed_by : uint8_t {
    device,
    cpu,   // from weights in host memory
    split, // the CPU computes gate and up, the device computes down from the CPU's rows
};

// Who computes which expert of a layer: Twiddler's Algorithm 1, extended to a CPU and a device that work in parallel.
//
// The cost model. For one layer and batch each expert runs once, for all of its tokens:
//   on the CPU     it takes cpu_start + cpu_per_token * n_tokens;
//   on the device  it takes `device`, the same for all experts of a kind. A miss takes `transfer` on the link before.
// The CPU, the device and the link each work on one expert at a time. Of a split expert the device and the link have
// the share `down` and the CPU has the rest. All three work in parallel, and the device still has to compute the last
// expert that was uploaded or handed over. A layer takes
//   max(sum on the CPU + the longest `device` of a split expert,
//       sum on the device,
//       sum on the link + the longest `device` of an uploaded expert)
// The first term is slightly too long: the CPU starts with split experts. Reads from disk are the same in all cases and
// are left out. Example: cpu 0.8 ms, device 0.2 ms, transfer 0.5 ms, three misses. With one expert on the CPU the layer
// takes max(0.8, 0.4, 1.2) = 1.2 ms; without, 1.7 ms.
//
// An expert that the CPU computes bypasses the device's cache. Later tokens may miss it there, which costs `bypass`.

// Seconds for an expert of one kind: of one type and shape. None is negative.
struct expert_costs {
    double cpu_start;
    double cpu_per_token;
    double device;
    double transfer;
    double down   = 0.0; // the last product's share of work and bytes; 0: the expert cannot be split
    double bypass = 0.0; // expected later cost of not uploading the expert

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

// The time of the layer under this placement.
double layer_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                     const placed_experts & placed);

// The expected later time that this placement causes.
double bypass_seconds(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                      const placed_experts & placed);

// The placement that minimises layer_seconds + bypass_seconds. Experts present on the device stay there. With may_split
// at most one expert is split, to balance what whole experts leave uneven. Within a kind the CPU gets the experts with
// the fewest tokens, then comes the split one. So only one number per kind is searched, which is exact and fast.
placed_experts place_experts(const std::vector<expert_costs> & costs, const std::vector<expert_work> & work,
                             bool may_split);

} // namespace hobbit
