// SPDX-License-Identifier: MIT
#include "plan/second-pass.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hobbit {

static bool is_one_token_each(const batch_info & batch) {
    return std::all_of(batch.sequences().begin(), batch.sequences().end(),
                       [](const auto & entry) { return entry.second == 1; });
}

void second_pass::begin(batch_info & batch, sequence_thresholds & thresholds, bool can_repeat) {
    std::set<int32_t> lossy; // sequences with a confidence
    for (const auto & entry : batch.sequences()) {
        const score_thresholds & own = thresholds.own(entry.first);
        if (own.confidence > 0.0 && !own.all_high()) {
            lossy.insert(entry.first);
        }
    }
    const bool is_draft = can_repeat && !lossy.empty() && is_one_token_each(batch) && batch.has_all_outputs();
    batch.set_pass(is_draft ? batch_pass::draft : batch_pass::only);
    thresholds.raise(is_draft ? std::set<int32_t>() : lossy);
    drafts_ = is_draft ? std::move(lossy) : std::set<int32_t>();
    layers_.clear();
    counts_ = {};
}

void second_pass::keep(const layer_routing & routing, const layer_plan & plan, const step_counts & counts) {
    layers_.resize(std::max(layers_.size(), size_t(routing.layer) + 1));
    layers_[routing.layer]  = { routing.experts, plan.precisions };
    counts_.skipped        += counts.skipped;
    for (const tier_id tier : TIERS) {
        counts_.selections[tier] += counts.selections[tier];
    }
}

bool second_pass::is_new(const layer_routing & routing, int32_t selection, precision served) const {
    const drafted_layer & draft = layers_.at(routing.layer);
    const auto            first = selection / routing.n_used * routing.n_used; // first selection of the token
    for (auto i = first; i < first + routing.n_used; i++) {
        if (draft.experts[size_t(i)] == routing.experts[size_t(selection)]) {
            return draft.precisions[size_t(i)] < served;
        }
    }
    return true;
}

// The largest probability of a softmax. NaN where a logit is NaN.
static double best_probability(const float * logits, size_t n) {
    const double best = *std::max_element(logits, logits + n);
    double       sum  = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += std::exp(double(logits[i]) - best);
    }
    return 1.0 / sum;
}

uint64_t second_pass::judge(batch_info & batch, sequence_thresholds & thresholds, const float * logits,
                            size_t n_vocab) const {
    std::set<int32_t> unsure;
    for (size_t i = 0; i < batch.tokens().size(); i++) {
        const int32_t sequence = batch.tokens()[i].sequence;
        const double  least    = thresholds.own(sequence).confidence;
        const bool    is_sure  = logits && best_probability(logits + i * n_vocab, n_vocab) > least;
        if (drafts_.count(sequence) > 0 && !is_sure) {
            unsure.insert(sequence);
        }
    }
    const uint64_t n_unsure = unsure.size();
    if (n_unsure > 0) {
        batch.set_pass(batch_pass::second);
        thresholds.raise(std::move(unsure));
    }
    return n_unsure;
}

} // namespace hobbit
