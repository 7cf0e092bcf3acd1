// SPDX-License-Identifier: MIT
#include "plan/scorer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace hobbit {

static precision decide(double score, const score_thresholds & thresholds) {
    if (thresholds.t1 >= 1.0 || score <= thresholds.t1) {
        return PRECISION_HIGH;
    }
    if (thresholds.t2 >= 1.0 || score <= thresholds.t2) {
        return PRECISION_LOW;
    }
    return PRECISION_SKIP;
}

void score_experts(const float * weights, size_t n, const score_thresholds & thresholds, precision * out) {
    const double sum = std::accumulate(weights, weights + n, 0.0);
    if (thresholds.t1 >= 1.0 || !(sum > 0.0) || !std::isfinite(sum)) {
        std::fill(out, out + n, PRECISION_HIGH);
        return;
    }

    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });

    double score = 0.0;
    for (size_t rank = 0; rank < n; rank++) {
        const size_t i  = order[rank];
        out[i]          = rank == 0 ? PRECISION_HIGH : decide(score, thresholds);
        score          += weights[i] / sum;
    }
}

precision serve(precision worth, bool high_is_resident, bool low_is_resident) {
    if (worth == PRECISION_HIGH || high_is_resident) {
        return PRECISION_HIGH;
    }
    return low_is_resident ? PRECISION_LOW : worth;
}

} // namespace hobbit
