// SPDX-License-Identifier: MIT
#include "plan/sequence-thresholds.h"

#include <limits>

namespace hobbit {

std::vector<score_thresholds> sequence_thresholds::of(const std::vector<batch_info::row> & rows) const {
    std::vector<score_thresholds> all;
    for (const batch_info::row & row : rows) {
        all.push_back(of(row.sequence));
    }
    return all;
}

score_thresholds sequence_thresholds::highest(const batch_info & batch) const {
    if (batch.sequences().empty()) {
        return common_;
    }
    score_thresholds most = { 0.0, 0.0, std::numeric_limits<double>::infinity() };
    for (const auto & entry : batch.sequences()) {
        most = higher(most, of(entry.first));
    }
    return most;
}

} // namespace hobbit
