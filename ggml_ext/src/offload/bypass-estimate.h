// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-tiers.h"

#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

namespace hobbit {

// How many further misses an expert causes that bypasses the pools: that is missed, computed elsewhere, and may not
// come to them. Beside the pools, which lack what bypassed them, it follows which experts they would hold had none done
// so; what they miss more than those is divided by how many did, as far as that is decided: those were used again
// since, or would have been evicted. What happened during the last few hundred misses counts. Where nothing bypasses
// the pools for long, nothing is known any more, and is learnt anew.
//
// Where a layer uses more than its even share of the pools, as with a prompt, what comes to them evicts others that the
// same tokens use: bypassing counts as harmless, nothing is learnt, and the pools are followed anew afterwards.
//
// Thread-safety: none. Pure: no clock, and no weights.
class bypass_estimate {
  public:
    struct use {
        tier_expert expert;
        bool        is_missed; // not all of it is in the pools, or on its way there
    };

    // The pools, which are followed from the first layer on, and their policies must outlive the object.
    explicit bypass_estimate(const resident_tiers & pools) : pools_(pools) {}

    // A layer has chosen these. The policy has heard of it.
    void begin_layer(layer_id layer, const std::vector<use> & uses);

    // One of those missed bypasses the pools.
    void bypassed(const tier_expert & e);

    // A term was prefetched while layer `running` ran: where it comes too late, that is no bypass's fault.
    void prefetched(const expert_term & term, layer_id running);

    // Of each that bypasses the pools in this layer; from 0, where it does no harm, to 1. 0 as long as little is known.
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
    std::set<layer_id>            layers_;    // that use them
    std::optional<resident_tiers> without_;   // what they would hold
    std::set<tier_key>            undecided_; // those that bypassed the pools, and have not been used since
    std::set<term_key>            ahead_;     // terms that are in without_ for having been prefetched alone
    std::vector<expert_term>      evicted_;   // from without_, since the last decisions
    double                        n_further_ = 0.0;
    double                        n_decided_ = 0.0;
};

} // namespace hobbit
