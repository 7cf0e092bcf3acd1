// SPDX-License-Identifier: MIT
#include "offload/upload-gain.h"

#include <algorithm>

namespace hobbit {

static constexpr double MOST_COUNTED = 256.0; // uploads that the mean goes back
static constexpr double FEW          = 16.0;  // uploads, which prove nothing

using pairs = std::map<std::tuple<layer_id, uint32_t, term_id>, std::tuple<layer_id, uint32_t, term_id>>;

// Ends the pair that `one` is in, with `others` the same pairs by their other expert.
static void end_pair(pairs & ones, pairs & others, const pairs::key_type & one) {
    const auto found = ones.find(one);
    if (found != ones.end()) {
        others.erase(found->second);
        ones.erase(found);
    }
}

void upload_gain::replaced(const expert_term & newcomer, const expert_term & victim) {
    const key in  = key_of(newcomer);
    const key out = key_of(victim);
    end_pair(victims_, newcomers_, in);
    end_pair(victims_, newcomers_, out);
    end_pair(newcomers_, victims_, in);
    end_pair(newcomers_, victims_, out);
    victims_[in]     = out;
    newcomers_[out]  = in;
    sum_            -= sum_ / MOST_COUNTED;
    n_uploads_      += 1.0 - n_uploads_ / MOST_COUNTED;
}

void upload_gain::used(const expert_term & e) {
    sum_ += double(victims_.count(key_of(e))) - double(newcomers_.count(key_of(e)));
}

double upload_gain::further_hits() const {
    return n_uploads_ < FEW ? 0.0 : std::max(0.0, sum_ / n_uploads_);
}

} // namespace hobbit
