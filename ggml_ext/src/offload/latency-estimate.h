// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <vector>

namespace hobbit {

// How long jobs of one kind take: so much for each, and so much for each unit (token, byte) of them. The line is given
// once, and corrected by what was measured since: recursive least squares in the line's own scale, so that no time and
// no unit is too small or too large; older samples fade. What was not seen for a while is believed less. Pure: no
// clock.
class latency_estimate {
  public:
    // Jobs done one after the other, and their units together.
    struct work {
        double jobs  = 0.0;
        double units = 0.0;
    };

    // What several kinds took together.
    struct part {
        latency_estimate * estimate;
        work               done;
    };

    // REQUIRES: neither is negative, and both are not 0.
    latency_estimate(double per_job, double per_unit) : line_{ per_job, per_unit } {}

    double per_job() const { return line_[0]; }
    double per_unit() const { return line_[1]; }
    double seconds(const work & w) const { return line_[0] * w.jobs + line_[1] * w.units; }

    // One sample of all parts. A single one changes no line more than fourfold: the machine may have had other things
    // to do. REQUIRES: every estimate is there once and every part has jobs or units.
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
