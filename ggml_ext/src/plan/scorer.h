// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

namespace hobbit {

// What a missing expert is worth to a token, from least to most.
enum precision { PRECISION_SKIP, PRECISION_LOW, PRECISION_HIGH };

// Thresholds on the unimportance score. At t1 = 1 everything is high; at t2 = 1 nothing is skipped.
struct score_thresholds {
    double t1 = 1.0;
    double t2 = 1.0;
};

// Eq. 2 of HOBBIT for one token: the n selected experts are ranked by weight, normalised to a sum of 1; an expert's
// score is the sum of the weights of those ranked before it, so the first one is always worth high precision.
// Weights may come from any router (softmax or sigmoid, normalised or not); where they do not rank the experts (a sum
// that is not positive, or not finite) all are worth high precision.
// out[i] belongs to weights[i]. Pure.
void score_experts(const float * weights, size_t n, const score_thresholds & thresholds, precision * out);

// What serves an expert of that worth: a resident version at least as good, the high one first, else what it is worth.
precision serve(precision worth, bool high_is_resident, bool low_is_resident);

} // namespace hobbit
