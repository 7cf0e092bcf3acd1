// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// An expert that a layer needs.
struct expert_work {
    uint32_t kind;
    uint32_t n_rows;     // at least 1
    bool     is_present; // on the device
};

using cpu_experts = std::vector<bool>; // [expert] whether the CPU computes it

// Running means of the time that an expert takes in one place, for each kind of expert and number of rows. Numbers of
// rows count as the power of two below them. Pure: no clock.
class latency_means {
  public:
    explicit latency_means(size_t n_kinds) : kinds_(n_kinds) {}

    // Seconds for one expert. A number of rows without a sample counts in proportion to the next smaller one that has
    // samples; 0: there is none.
    double seconds(const expert_work & w) const;

    // The mean of a kind for 2^cell rows, or more up to the next cell; 0: it has no sample.
    double mean_seconds(uint32_t kind, size_t cell) const { return kinds_[kind][cell].seconds; }

    static constexpr size_t n_cells = 16;

    // A sample: the layer's experts that were computed here took so long, one after the other. Each mean gets its share
    // by what was expected, or all alike if one has no sample.
    void took(const std::vector<expert_work> & work, const cpu_experts & on_cpu, bool is_cpu, double seconds);

    // The next sample replaces the mean.
    void forget(const expert_work & w) { at(w).n_samples = 0; }

  private:
    struct mean {
        double   seconds   = 0.0;
        uint32_t n_samples = 0;
    };

    static size_t cell_of(uint32_t n_rows) { return std::min(n_cells - 1, size_t(std::log2(n_rows))); }

    mean & at(const expert_work & w) { return kinds_[w.kind][cell_of(w.n_rows)]; }

    std::vector<std::array<mean, n_cells>> kinds_;
};

} // namespace hobbit
