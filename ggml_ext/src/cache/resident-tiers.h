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
// term to that one alone. A residual is resident only beside its low version, is evicted with it, and is pinned at most
// as often.
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

    // Makes all terms of the expert resident while layer `running` runs, by urgent inserts. Returns false and changes
    // nothing if all slots of a pool are pinned. Evicted terms are added to `evicted`.
    bool insert(expert_id id, tier_id tier, layer_id running, std::vector<expert_term> & evicted);

    // Returns true if the term's base, the low version of a residual, is resident; true without a base. REQUIRES:
    // has(base)
    bool has_base(expert_id id, term_id term) const { return base_of(term) == term || set(base_of(term)).contains(id); }

    // Inserts one term, which is not resident; see resident_set. Returns false also if has_base is false.
    bool insert_term(expert_id id, term_id term, layer_id running, resident_set::pressure how,
                     std::vector<expert_term> & evicted);

    // Evicts a term, and its residual if it has one; both are added to `evicted`. REQUIRES: resident and not pinned.
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

    void forget_fresh_slots(term_id term) { sets_[term]->forget_fresh_slots(); }

    // Marks the expert's resident terms.
    void set_duplicate(expert_id id, tier_id tier, bool on);

    // Ends the protection of all experts of a layer.
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
