// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace hobbit {

// How many more uses an upload serves than it costs: the mean over the uploads that evicted an expert, of the
// newcomer's uses less the victim's. A pair is observed until the newcomer is evicted or the victim comes back. Where
// all experts are equally likely this is 0; where a text stays with its experts it is their further uses.
//
// Thread-safety: none. Pure: no clock.
class upload_gain {
  public:
    // A newcomer was uploaded into the victim's slot.
    void replaced(const expert_tier & newcomer, const expert_tier & victim) {
        const key in  = key_of(newcomer);
        const key out = key_of(victim);
        end_pair(in);
        end_pair(out);
        pairs_[in]   = { out, 1.0 };
        pairs_[out]  = { in, -1.0 };
        sum_        -= sum_ / most_counted;
        n_uploads_  += 1.0 - n_uploads_ / most_counted;
    }

    // A layer uses the expert. REQUIRES: told before the layer's uploads
    void used(const expert_tier & e) {
        const auto found  = pairs_.find(key_of(e));
        sum_             += found == pairs_.end() ? 0.0 : found->second.gain;
    }

    // Not negative; 0 with few samples.
    double further_hits() const { return n_uploads_ < few ? 0.0 : std::max(0.0, sum_ / n_uploads_); }

  private:
    using key = std::tuple<layer_id, uint32_t, tier_id>;

    struct half {
        key    other; // the other one of the pair
        double gain;  // gain of a use: 1 for the newcomer, -1 for the victim
    };

    static constexpr double most_counted = 256.0; // uploads that the mean goes back
    static constexpr double few          = 16.0;  // uploads, which prove nothing

    static key key_of(const expert_tier & e) { return { e.id.layer, e.id.expert, e.tier }; }

    void end_pair(const key & one) {
        const auto found = pairs_.find(one);
        if (found != pairs_.end()) {
            pairs_.erase(found->second.other);
            pairs_.erase(found);
        }
    }

    std::map<key, half> pairs_; // [newcomer] and [victim]; an expert is in one pair
    double              sum_       = 0.0;
    double              n_uploads_ = 0.0;
};

} // namespace hobbit
