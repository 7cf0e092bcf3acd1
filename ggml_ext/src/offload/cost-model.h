// SPDX-License-Identifier: MIT
#pragma once

#include "offload/latency-estimate.h"
#include "offload/placement.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hobbit {

// The latencies that experts are placed by (placement.h), and the placement itself. Latencies are given once, and
// corrected by what was measured since. In automatic mode what was not measured for a while is tried again with one
// expert: an estimate that is too long would never be corrected otherwise. Where the trial says what was expected, the
// next one is twice as far away. So it is in every mode with the device's time, which is known only where it is waited
// for. CPU, device and link may hinder each other, where they share cores or memory: what a layer takes longer than it
// would without that is learnt for each company in which they work.
//
// Thread-safety: none. Pure: no clock.
class cost_model {
  public:
    struct kind_seed {
        size_t bytes; // that go over the link
        double down;  // see expert_costs
        double cpu_start;
        double cpu_per_token;
        double device_start;
        double device_per_token;
    };

    struct placement {
        placed_experts by; // [expert]
        double         seconds         = 0.0;
        bool           measures_device = false; // device_took wants to be told
        bool           measures_layer  = false; // layer_took does
        bool           may_use_cpu     = false; // in a layer like this one, though here it does not
    };

    static constexpr uint32_t max_wait        = 4096; // layers between trials
    static constexpr uint32_t max_device_wait = 64;   // between those of the device, for which the CPU waits
    static constexpr uint32_t told_wait       = 31;   // layers until a company is measured again; a prime, so that it
                                                      // is not always the same layer

    cost_model(const std::vector<kind_seed> & kinds, double transfer_per_byte, compute_mode mode);

    // Without may_split no expert is split. Each that bypasses the device is missed there `further_misses` times more,
    // from 0 to 1 (bypass_estimate).
    placement place(const std::vector<expert_work> & work, bool may_split = true, double further_misses = 0.0);

    // Whether place() chooses.
    bool chooses() const { return mode_ == compute_mode::automatic; }

    // Of a layer that cannot be shared.
    placement leave_to_device(const std::vector<expert_work> & work);

    // What the CPU's work of a placement took, and the device's alone.
    void cpu_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds);
    void device_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds);

    // In place of device_took, where the layer did not go as it was placed.
    void device_not_told() { device_trial_.put_off(); }

    // What the layer took.
    void layer_took(const std::vector<expert_work> & work, const placement & p, double seconds);

    // For how long the link was busy with so many bytes, at least one.
    void link_took(double bytes, double seconds);

    // [kind], in a layer with this work.
    std::vector<expert_costs> costs(const std::vector<expert_work> & work) const;

  private:
    // When something that is not chosen is tried again.
    struct trial {
        uint32_t most   = max_wait;
        uint32_t back   = max_wait; // by how much a surprise divides the wait
        uint32_t wait   = 1;        // layers
        uint32_t waited = 0;

        bool is_due();
        void put_off();
        void end(double expected, double measured);
    };

    struct kind_state {
        size_t           bytes;
        double           down;
        latency_estimate cpu;
        latency_estimate device;
        trial            cpu_trial = {};
    };

    using works = std::vector<latency_estimate::work>; // [kind]

    // The part of work number i that is counted.
    using portion = std::function<double(size_t)>;

    std::vector<expert_costs>           costs_of(const works & all) const;
    placed_experts                      place_alone_or_together(const std::vector<expert_work> & work, bool may_split,
                                                                double further_misses) const;
    double                              seconds(const std::vector<expert_work> & work, const placed_experts & by) const;
    double                              on_device(const expert_work & w, computed_by by) const;
    works                               sum(const std::vector<expert_work> & work, const portion & counted) const;
    std::vector<latency_estimate::part> parts(const works & sums, latency_estimate kind_state::* whose);
    void                                try_others(const std::vector<expert_work> & work, placed_experts & by);
    void                                finish(const std::vector<expert_work> & work, placement & p);

    std::vector<kind_state> kinds_;
    latency_estimate        link_; // units: bytes
    trial                   link_trial_;
    trial                   device_trial_ = { max_device_wait, 2 };
    const compute_mode      mode_;

    static constexpr size_t n_companies = 8;

    std::array<double, n_companies>   slowdown_;             // [who works at once]
    std::array<uint64_t, n_companies> told_     = {};        // n_placed_ when it was told of last
    uint64_t                          n_placed_ = told_wait; // layers; as if none had been told of for a while
};

} // namespace hobbit
