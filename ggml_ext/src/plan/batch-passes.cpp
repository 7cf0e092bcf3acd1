// SPDX-License-Identifier: MIT
#include "plan/batch-passes.h"

#include <algorithm>
#include <utility>

namespace hobbit {

static bool is_one_token_each(const batch_info & batch) {
    return std::all_of(batch.sequences().begin(), batch.sequences().end(),
                       [](const auto & entry) { return entry.second == 1; });
}

batch_passes::batch_passes() {
    const auto & names = registered_judge::names();
    judge_             = names.empty() ? nullptr : registered_judge::make({ names.front() });
}

void batch_passes::begin(batch_info & batch, sequence_thresholds & thresholds, bool can_repeat) {
    std::set<int32_t> lossy; // sequences that draft
    for (const auto & entry : batch.sequences()) {
        const score_thresholds & own = thresholds.own(entry.first);
        if (judge_ && judge_->drafts(own)) {
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

void batch_passes::keep(const layer_routing & routing, const layer_plan & plan, const step_counts & counts) {
    layers_.resize(std::max(layers_.size(), size_t(routing.layer) + 1));
    layers_[routing.layer]  = { routing.experts, plan.precisions };
    counts_.skipped        += counts.skipped;
    for (const tier_id tier : TIERS) {
        counts_.selections[tier] += counts.selections[tier];
    }
}

bool batch_passes::is_new(const layer_routing & routing, int32_t selection, precision served) const {
    const drafted_layer & draft = layers_.at(routing.layer);
    const auto            first = selection / routing.n_used * routing.n_used; // first selection of the token
    for (auto i = first; i < first + routing.n_used; i++) {
        if (draft.experts[size_t(i)] == routing.experts[size_t(selection)]) {
            return draft.precisions[size_t(i)] < served;
        }
    }
    return true;
}

uint64_t batch_passes::judge(batch_info & batch, sequence_thresholds & thresholds, const float * logits,
                             size_t n_vocab) const {
    std::set<int32_t> unsure;
    for (size_t i = 0; i < batch.tokens().size(); i++) {
        const int32_t sequence = batch.tokens()[i].sequence;
        const auto    keeps    = [&] {
            return logits && judge_->keeps(thresholds.own(sequence), logits + i * n_vocab, n_vocab);
        };
        if (drafts_.count(sequence) > 0 && !keeps()) {
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
