// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-tiers.h"

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
    void replaced(const expert_term & newcomer, const expert_term & victim);

    // A layer uses the expert. REQUIRES: told before the layer's uploads
    void used(const expert_term & e);

    // Not negative; 0 with few samples.
    double further_hits() const;

  private:
    using key = std::tuple<layer_id, uint32_t, term_id>;

    static key key_of(const expert_term & e) { return { e.id.layer, e.id.expert, e.term }; }

    struct half {
        key    other; // of the pair
        double gain;  // of a use: 1 of the newcomer's, -1 of the victim's
    };

    void end_pair(const key & one);

    std::map<key, half> pairs_; // [newcomer] and [victim]; an expert is in one pair
    double              sum_       = 0.0;
    double              n_uploads_ = 0.0;
};

} // namespace hobbit
