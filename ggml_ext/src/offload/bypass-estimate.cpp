// SPDX-License-Identifier: MIT
#include "offload/bypass-estimate.h"

#include <algorithm>
#include <array>

namespace hobbit {

static constexpr double COUNTED = 512.0; // misses
static constexpr double FEW     = 16.0;  // decided ones, which prove nothing

bool bypass_estimate::is_within_share(const std::vector<use> & uses) const {
    per_term<size_t> n_terms = {};
    for (const use & u : uses) {
        for (const term_id term : pools_.terms(u.expert.tier)) {
            n_terms[term]++;
        }
    }
    const auto fits = [&](term_id term) {
        return n_terms[term] == 0 || n_terms[term] * layers_.size() <= pools_.set(term).n_slots();
    };
    return std::all_of(TERMS.begin(), TERMS.end(), fits);
}

// What is there in part would be missed anyway.
void bypass_estimate::follow_anew() {
    without_.emplace(pools_);
    without_->drop_marks();
    for (const term_id term : TERMS) {
        if (!pools_.has(term)) {
            continue;
        }
        for (const expert_id & id : pools_.set(term).residents()) {
            if (pools_.set(term).is_in_part(id) && without_->set(term).contains(id)) {
                without_->erase_term(id, term, evicted_);
            }
        }
    }
    evicted_.clear();
}

void bypass_estimate::begin_layer(layer_id layer, const std::vector<use> & uses) {
    layers_.insert(layer);
    if (!is_within_share(uses)) {
        without_.reset();
        undecided_.clear();
        ahead_.clear();
        return;
    }
    if (!without_) {
        follow_anew();
    }
    std::for_each(uses.begin(), uses.end(), [&](const use & u) { count(u); });
    hold(layer, uses);
    n_further_ = std::clamp(n_further_, -n_decided_, n_decided_);
    ahead_.erase(ahead_.lower_bound({ layer, {}, 0 }), ahead_.lower_bound({ layer_id(layer + 1), {}, 0 }));
}

void bypass_estimate::count(const use & u) {
    const auto & terms    = pools_.terms(u.expert.tier);
    const bool   is_there = without_->contains(u.expert.id, u.expert.tier);
    const auto   is_ahead = [&](term_id term) { return ahead_.count(key(expert_term{ u.expert.id, term })) > 0; };
    if (u.is_missed) {
        n_further_ -= n_further_ / COUNTED;
        n_decided_ -= n_decided_ / COUNTED;
        n_further_ += is_there && std::none_of(terms.begin(), terms.end(), is_ahead);
    } else {
        n_further_ -= !is_there;
    }
    decide(u.expert);
}

// All of them: there is room.
void bypass_estimate::hold(layer_id layer, const std::vector<use> & uses) {
    for (const auto & [expert, is_missed] : uses) {
        without_->insert(expert.id, expert.tier, layer, evicted_);
        without_->pin(expert.id, expert.tier);
        without_->touch(expert.id, expert.tier);
    }
    for (const auto & [expert, is_missed] : uses) {
        without_->unpin(expert.id, expert.tier);
    }
    decide_evicted();
}

void bypass_estimate::bypassed(const tier_expert & e) {
    if (without_) {
        undecided_.insert(key(e));
    }
}

void bypass_estimate::prefetched(const expert_term & term, layer_id running) {
    if (!without_ || without_->set(term.term).contains(term.id)) {
        return;
    }
    if (without_->insert_term(term.id, term.term, running, resident_set::pressure::polite, evicted_)) {
        ahead_.insert(key(term));
    }
    decide_evicted();
}

void bypass_estimate::decide(const tier_expert & e) {
    n_decided_ += double(undecided_.erase(key(e)));
}

void bypass_estimate::decide_evicted() {
    std::for_each(evicted_.begin(), evicted_.end(), [&](const expert_term & e) { decide({ e.id, tier_of(e.term) }); });
    evicted_.clear();
}

double bypass_estimate::further_misses() const {
    return without_ && n_decided_ >= FEW ? std::clamp(n_further_ / n_decided_, 0.0, 1.0) : 0.0;
}

} // namespace hobbit
