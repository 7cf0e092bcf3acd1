// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <vector>

namespace hobbit {

// The latency of jobs of one kind: a constant per job and a constant per unit (token, byte). The line is seeded once
// and corrected by each sample with recursive least squares. The fit is scaled by the line itself, so that it works for
// any time and unit. Older samples fade, and the variance grows while no sample arrives. Pure: no clock.
class latency_estimate {
  public:
    // Jobs done one after the other, and the sum of their units.
    struct work {
        double jobs  = 0.0;
        double units = 0.0;
    };

    // One kind's part of a time that was measured for several kinds together.
    struct part {
        latency_estimate * estimate;
        work               done;
    };

    // REQUIRES: neither is negative, and both are not 0.
    latency_estimate(double per_job, double per_unit) : line_{ per_job, per_unit } {}

    double per_job() const { return line_[0]; }
    double per_unit() const { return line_[1]; }
    double seconds(const work & w) const { return line_[0] * w.jobs + line_[1] * w.units; }

    // Adds one sample of all parts together. One sample changes a line by a factor of four at most, since another
    // process may have disturbed it. REQUIRES: no estimate occurs twice, and every part has jobs or units.
    static void correct(const std::vector<part> & parts, double measured);

  private:
    void                  drift(const work & w);
    std::array<double, 2> scale() const;
    std::array<double, 2> scaled(const work & w) const;

    std::array<double, 2> line_;
    double                typical_ = 1.0; // units of a job
    // relative to the line: variance of both, and their covariance
    std::array<double, 2> variance_   = { 1.0, 1.0 };
    double                covariance_ = 0.0;
};

} // namespace hobbit
