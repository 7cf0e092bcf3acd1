// SPDX-License-Identifier: MIT
#pragma once

#include "cache/resident-set.h"
#include "model/expert-index.h"

#include <cstdint>
#include <optional>
#include <vector>

namespace hobbit {

// A term of an expert, in its pool.
struct expert_term {
    expert_id id;
    term_id   term;
};

// The resident sets of all tiers as one. A function with a tier applies to all terms of the expert, a function with a
// term to that one alone. A term that is stored on another one (a residual on its low version)
//   is resident only beside that one, and leaves with it;
//   is pinned at most as often.
//
// Thread-safety: none.
class resident_tiers {
  public:
    explicit resident_tiers(tier_terms terms) : terms_(std::move(terms)) {}

    void add(term_id term, resident_set set) { sets_[term].emplace(std::move(set)); }

    bool has(term_id term) const { return sets_[term].has_value(); }

    // REQUIRES: has(term)
    const resident_set & set(term_id term) const { return *sets_[term]; }

    const std::vector<term_id> & terms(tier_id tier) const { return terms_[tier]; }

    bool contains(expert_id id, tier_id tier) const;

    // Gives every term that is not resident a slot while layer `running` runs, as urgent as can be. False, and nothing
    // changes, when one of the pools has none left to give. Who loses a slot is added to `evicted`.
    bool insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted);

    // Whether the term that this one is stored on, if any, is resident. REQUIRES: has(that one)
    bool has_base(expert_id id, term_id term) const { return base_of(term) == term || set(base_of(term)).contains(id); }

    // The same as insert, for a term that is not resident. False also without has_base.
    bool insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                     std::vector<expert_term> & evicted);

    // Frees the slots of a term and of what is stored on it; all of these are added to `evicted`.
    // REQUIRES: resident and not pinned.
    void erase_term(expert_id id, term_id term, std::vector<expert_term> & evicted);

    // REQUIRES: contains(id, tier)
    void touch(expert_id id, tier_id tier) {
        each(tier, [&](resident_set & set) { set.touch(id); });
    }
    void pin(expert_id id, tier_id tier) {
        each(tier, [&](resident_set & set) { set.pin(id); });
    }
    void unpin(expert_id id, tier_id tier) {
        each(tier, [&](resident_set & set) { set.unpin(id); });
    }
    void protect(expert_id id, tier_id tier) {
        each(tier, [&](resident_set & set) { set.set_protected(id, true); });
    }

    // For those of the expert's terms that are resident.
    void set_duplicate(expert_id id, tier_id tier, bool on);

    // Of a whole layer.
    void end_protection(layer_id layer, uint32_t n_experts);

  private:
    term_id base_of(term_id term) const { return terms(tier_of(term)).front(); }

    template <typename F>
    void each(tier_id tier, F apply) {
        for (const term_id term : terms(tier)) {
            apply(*sets_[term]);
        }
    }

    void drop_dependents(expert_id id, term_id term, std::vector<expert_term> & evicted);

    const tier_terms                      terms_;
    per_term<std::optional<resident_set>> sets_;
};

} // namespace hobbit
