// SPDX-License-Identifier: MIT
#include "offload/upload-gain.h"

#include <algorithm>

namespace hobbit {

static constexpr double MOST_COUNTED = 256.0; // uploads that the mean goes back
static constexpr double FEW          = 16.0;  // uploads, which prove nothing

void upload_gain::end_pair(const key & one) {
    const auto found = pairs_.find(one);
    if (found != pairs_.end()) {
        pairs_.erase(found->second.other);
        pairs_.erase(found);
    }
}

void upload_gain::replaced(const expert_term & newcomer, const expert_term & victim) {
    const key in  = key_of(newcomer);
    const key out = key_of(victim);
    end_pair(in);
    end_pair(out);
    pairs_[in]   = { out, 1.0 };
    pairs_[out]  = { in, -1.0 };
    sum_        -= sum_ / MOST_COUNTED;
    n_uploads_  += 1.0 - n_uploads_ / MOST_COUNTED;
}

void upload_gain::used(const expert_term & e) {
    const auto found  = pairs_.find(key_of(e));
    sum_             += found == pairs_.end() ? 0.0 : found->second.gain;
}

double upload_gain::further_hits() const {
    return n_uploads_ < FEW ? 0.0 : std::max(0.0, sum_ / n_uploads_);
}

} // namespace hobbit
