// SPDX-License-Identifier: MIT
#pragma once

#include "latency-estimate.h"
#include "placement.h"

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
        double cpu_start;
        double cpu_per_token;
        double device_start;
        double device_per_token;
    };

    struct placement {
        std::vector<bool> on_cpu; // [expert]
        double            seconds         = 0.0;
        bool              measures_device = false; // device_took wants to be told
        bool              may_use_cpu     = false; // in a layer like this one, though here it does not
    };

    static constexpr uint32_t max_wait        = 4096; // layers between trials
    static constexpr uint32_t max_device_wait = 64;   // between those of the device, for which the CPU waits

    cost_model(const std::vector<kind_seed> & kinds, double transfer_per_byte, compute_mode mode);

    placement place(const std::vector<expert_work> & work);

    // Of a layer that cannot be shared.
    placement leave_to_device(const std::vector<expert_work> & work);

    // What the CPU's experts of a placement took, and the device's alone.
    void cpu_took(const std::vector<expert_work> & work, const std::vector<bool> & on_cpu, double seconds);
    void device_took(const std::vector<expert_work> & work, const std::vector<bool> & on_cpu, double seconds);

    // In place of device_took, where the layer did not go as it was placed.
    void device_not_told() { device_trial_.put_off(); }

    // What the layer took that was placed last.
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
        latency_estimate cpu;
        latency_estimate device;
        trial            cpu_trial = {};
    };

    using works = std::vector<latency_estimate::work>; // [kind]

    std::vector<expert_costs> costs_of(const works & all) const;
    std::vector<bool>         place_alone_or_together(const std::vector<expert_work> & work) const;
    double                    seconds(const std::vector<expert_work> & work, const std::vector<bool> & on_cpu) const;
    works sum(const std::vector<expert_work> & work, const std::function<bool(size_t)> & counts) const;
    std::vector<latency_estimate::part> parts(const works & sums, latency_estimate kind_state::* whose);
    void                                try_others(const std::vector<expert_work> & work, std::vector<bool> & on_cpu);
    void                                finish(const std::vector<expert_work> & work, placement & p);

    std::vector<kind_state> kinds_;
    latency_estimate        link_; // units: bytes
    trial                   link_trial_;
    trial                   device_trial_ = { max_device_wait, 2 };
    const compute_mode      mode_;

    std::array<double, 4> slowdown_ = { 1.0, 1.0, 1.0, 1.0 }; // [who works at once]
};

} // namespace hobbit
