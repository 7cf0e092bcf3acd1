// SPDX-License-Identifier: MIT
#include "plan/precision-rule.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hobbit {

bool ranks_experts(const float * weights, size_t n) {
    const double sum = std::accumulate(weights, weights + n, 0.0);
    return sum > 0.0 && std::isfinite(sum);
}

std::vector<size_t> by_weight(const float * weights, size_t n) {
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weights[a] > weights[b]; });
    return order;
}

score_thresholds higher(const score_thresholds & a, const score_thresholds & b) {
    return { std::max(a.t1, b.t1), std::max(a.t2, b.t2), std::min(a.price, b.price) };
}

precision of_score(double score, const score_thresholds & thresholds) {
    if (score <= thresholds.t1) {
        return precision::high;
    }
    // the sum may be rounded to a score above 1
    return thresholds.t2 >= 1.0 || score <= thresholds.t2 ? precision::low : precision::skip;
}

} // namespace hobbit
