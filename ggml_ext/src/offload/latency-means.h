// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hobbit {

// Running means of the time that an expert takes in one place, for each kind of expert and number of rows. Numbers of
// rows count as the power of two below them. Pure: no clock.
class latency_means {
  public:
    // An expert to compute, once for all of its rows.
    struct job {
        uint32_t kind;
        uint32_t n_rows; // at least 1
    };

    explicit latency_means(size_t n_kinds) : kinds_(n_kinds) {}

    // Of one expert. A number of rows without a sample counts in proportion to the next smaller one that has samples,
    // or else takes as long as the next larger one. 0: the kind has no sample.
    double seconds(const job & j) const;

    // The mean of a kind for 2^cell rows, or more up to the next cell; 0: it has no sample.
    double mean_seconds(uint32_t kind, size_t cell) const { return kinds_[kind][cell].seconds; }

    static constexpr size_t n_cells = 16;

    // A sample: these experts took so long, one after the other. Each mean gets its share by what was expected.
    // REQUIRES: at least one expert
    void took(const std::vector<job> & jobs, double seconds);

    // The expert was placed elsewhere. Returns whether its mean is so old that it should be measured again.
    bool pass_over(const job & j) { return ++at(j).age >= max_age; }

    // A mean is old after so many experts that were placed elsewhere. The next sample replaces it.
    static constexpr uint32_t max_age = 1024;

  private:
    struct mean {
        double   seconds   = 0.0;
        uint32_t n_samples = 0;
        uint32_t age       = 0;

        void add(double sample);
    };

    static size_t cell_of(uint32_t n_rows);

    mean & at(const job & j) { return kinds_[j.kind][cell_of(j.n_rows)]; }

    std::vector<std::array<mean, n_cells>> kinds_;
};

} // namespace hobbit
