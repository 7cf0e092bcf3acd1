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

// Places experts (placement.h) by latencies that are seeded once and corrected by measurement. In automatic mode a
// choice that was not measured for a while is tried again with one expert: an estimate that is too long would
// otherwise never be corrected. Each confirmed re-measurement doubles the interval to the next (exponential back-off).
// The device's time is re-measured in every mode, because measuring it makes the CPU wait. For each combination of
// resources active at once (CPU, link, split) a slowdown factor is learnt, since they share cores and memory.
//
// Thread-safety: none. Pure: no clock.
class cost_model {
  public:
    struct kind_seed {
        size_t bytes; // of an upload
        double down;  // see expert_costs
        double cpu_start;
        double cpu_per_token;
        double device_start;
        double device_per_token;
    };

    struct placement {
        placed_experts by; // [expert]
        double         seconds         = 0.0;
        bool           measures_device = false; // call device_took
        bool           measures_layer  = false; // call layer_took
        bool           may_use_cpu     = false; // a layer like this one may use the CPU, even if this one does not
    };

    static constexpr uint32_t max_wait        = 4096; // layers between trials
    static constexpr uint32_t max_device_wait = 64;   // between trials of the device, which make the CPU wait
    static constexpr uint32_t max_unmeasured  = 31;   // layers until a combination is measured again; a prime, so
                                                      // that the layer varies

    cost_model(const std::vector<kind_seed> & kinds, double transfer_per_byte, compute_mode mode);

    // Without may_split no expert is split. further_misses: see bypass_estimate.
    placement place(const std::vector<expert_work> & work, bool may_split = true, double further_misses = 0.0);

    // Whether place() has a choice.
    bool chooses() const { return mode_ == compute_mode::automatic; }

    // The placement of a layer that the CPU cannot share.
    placement leave_to_device(const std::vector<expert_work> & work);

    // Samples: the time of the CPU's work of a placement, and of the device's work alone.
    void cpu_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds);
    void device_took(const std::vector<expert_work> & work, const placed_experts & by, double seconds);

    // Call instead of device_took if the layer was not executed as placed; discards the sample.
    void discard_device_sample() { device_trial_.put_off(); }

    // Sample: the time of the layer.
    void layer_took(const std::vector<expert_work> & work, const placement & p, double seconds);

    // Sample: the time that the link was busy with `bytes`. REQUIRES: at least one byte
    void link_took(double bytes, double seconds);

    // [kind], in a layer with this work.
    std::vector<expert_costs> costs(const std::vector<expert_work> & work) const;

  private:
    // When a choice that is not taken is tried again.
    struct trial {
        uint32_t most   = max_wait;
        uint32_t back   = max_wait; // the wait is divided by this after an unexpected result
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

    // The share of work number i that counts.
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

    static constexpr size_t n_combinations = 8;

    std::array<double, n_combinations>   slowdown_;                     // [combination]
    std::array<uint64_t, n_combinations> measured_at_ = {};             // [combination] n_placed_ at its last sample
    uint64_t                             n_placed_    = max_unmeasured; // layers; the start value makes all samples due
};

} // namespace hobbit
