// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-tiers.h"

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

namespace hobbit {

// Extra misses per bypassed expert. An expert bypasses the pools if it is missed, computed on the CPU, and not
// uploaded. A shadow cache without weights tracks what the pools would hold if every miss had been uploaded. The
// estimate is the misses of the pools that are hits there, divided by the bypassed experts. Only bypassed experts count
// that have been re-used since, or evicted from the shadow cache. Older samples fade over a few hundred misses. If
// nothing bypasses the pools for long, the estimate starts again from nothing.
//
// A layer that uses more than its even share of the pools, as with a prompt, evicts experts that the same tokens use.
// Bypassing then counts as harmless, nothing is learnt, and the shadow cache restarts afterwards.
//
// Thread-safety: none. Pure: no clock, and no weights.
class bypass_estimate {
  public:
    struct use {
        tier_expert expert;
        bool        is_missed; // not completely resident or in flight
    };

    // The pools and their policies must outlive the object. The first layer copies the pools into the shadow cache.
    explicit bypass_estimate(const resident_tiers & pools) : pools_(pools) {}

    // The router of a layer has chosen these experts. REQUIRES: the policy has been told.
    void begin_layer(layer_id layer, const std::vector<use> & uses);

    // A missed expert bypasses the pools.
    void bypassed(const tier_expert & e);

    // A term was prefetched while layer `running` ran. A prefetch that comes too late is not counted against bypassing.
    void prefetched(const expert_term & term, layer_id running);

    // Extra misses for each expert that bypasses the pools in this layer, from 0 to 1. 0 without enough samples.
    double further_misses() const;

  private:
    using tier_key = std::tuple<layer_id, tier_id, uint32_t>; // by layer
    using term_key = std::tuple<layer_id, term_id, uint32_t>;

    static tier_key key(const tier_expert & e) { return { e.id.layer, e.tier, e.id.expert }; }
    static term_key key(const expert_term & e) { return { e.id.layer, e.term, e.id.expert }; }

    bool is_within_share(const std::vector<use> & uses) const;
    void follow_anew();
    void count(const use & u);
    void hold(layer_id layer, const std::vector<use> & uses);
    void decide(const tier_expert & e);
    void decide_evicted();

    const resident_tiers &        pools_;
    std::set<layer_id>            layers_;    // that use the pools
    std::optional<resident_tiers> without_;   // the shadow cache
    std::set<tier_key>            undecided_; // bypassed, not re-used since
    std::set<term_key>            ahead_;     // in the shadow cache only by prefetch
    std::vector<expert_term>      evicted_;   // from without_, since the last decisions
    double                        n_further_ = 0.0;
    double                        n_decided_ = 0.0;
};

} // namespace hobbit
