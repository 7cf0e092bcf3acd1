// SPDX-License-Identifier: MIT
#include "offload/latency-estimate.h"

#include <algorithm>
#include <cmath>

namespace hobbit {

static constexpr double NOISE    = 0.25; // of a sample, as a share of it
static constexpr double DRIFT    = 0.1;  // of the line from sample to sample, as a share of it
static constexpr double MAX_STEP = 4.0;  // what a sample may differ by: what is beyond counts as this
static constexpr double FADE     = 0.1;  // of typical numbers of units
static constexpr double LEAST    = 0.1;  // share of a typical time by which the smaller number of a line can grow

// The line's numbers, or what they may become of next to nothing.
std::array<double, 2> latency_estimate::scale() const {
    const double least = LEAST * (line_[0] + line_[1] * typical_);
    return { std::max(line_[0], least), std::max(line_[1], least / typical_) };
}

std::array<double, 2> latency_estimate::scaled(const work & w) const {
    return { w.jobs * scale()[0], w.units * scale()[1] };
}

// No variance beyond 1: a line that nothing is known of.
void latency_estimate::drift(const work & w) {
    typical_ += w.jobs > 0.0 && w.units > 0.0 ? FADE * (w.units / w.jobs - typical_) : 0.0;
    for (double & v : variance_) {
        v                   += DRIFT * DRIFT;
        const double shrink  = std::min(1.0, 1.0 / v);
        v                   *= shrink;
        covariance_         *= std::sqrt(shrink);
    }
}

void latency_estimate::correct(const std::vector<part> & parts, double measured) {
    double expected = 0.0;
    double variance = 0.0;
    for (const part & p : parts) {
        p.estimate->drift(p.done);
        expected                      += p.estimate->seconds(p.done);
        const latency_estimate &    e  = *p.estimate;
        const std::array<double, 2> x  = e.scaled(p.done);
        variance += e.variance_[0] * x[0] * x[0] + 2 * e.covariance_ * x[0] * x[1] + e.variance_[1] * x[1] * x[1];
    }
    const double seen  = std::min(std::max(measured, expected / MAX_STEP), expected * MAX_STEP);
    const double error = seen - expected;
    const double total = variance + std::pow(NOISE * expected, 2);
    for (const part & p : parts) {
        latency_estimate &          e   = *p.estimate;
        const std::array<double, 2> x   = e.scaled(p.done);
        const std::array<double, 2> own = e.scale();
        const std::array<double, 2> vx  = { e.variance_[0] * x[0] + e.covariance_ * x[1],
                                            e.covariance_ * x[0] + e.variance_[1] * x[1] };
        for (int i = 0; i < 2; i++) {
            e.line_[i]      = std::max(e.line_[i] / MAX_STEP, e.line_[i] + own[i] * vx[i] / total * error);
            e.variance_[i] -= vx[i] * vx[i] / total;
        }
        e.covariance_ -= vx[0] * vx[1] / total;
    }
}

} // namespace hobbit
