// SPDX-License-Identifier: MIT
#include "doors/batch-passes.h"
#include "execute/moe-executor.h"
#include "mechanisms/second_pass/second-pass-settings.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

namespace hobbit {

// The largest probability of a softmax. NaN where a logit is NaN.
static double best_probability(const float * logits, size_t n) {
    const double best = *std::max_element(logits, logits + n);
    double       sum  = 0.0;
    for (size_t i = 0; i < n; i++) {
        sum += std::exp(double(logits[i]) - best);
    }
    return 1.0 / sum;
}

namespace {

// MoBiLE's second pass (III-A): a draft is kept if its best probability is above the confidence of its sequence. If it
// is not, its token is computed again, with all experts in high precision.
//
// Drafts are batches of one token per sequence whose logits are wanted. Everything else of a sequence that drafts is in
// high precision: prompts, and the tokens that speculative decoding proposes.
class second_pass final : public batch_passes {
  public:
    status check(const rule_numbers & own, bool can_repeat, const std::string & model) const override {
        if (own[confidence_number] > 0.0 && !can_repeat) {
            return status::
                error("a confidence computes tokens a second time, and layers of '%s' keep a state that only "
                      "one pass may change: run this model with confidence = 0",
                      model.c_str());
        }
        if (own[confidence_number] > 0.0 && own.all_high()) {
            return status::error(
                "hobbit.confidence computes unsure tokens again, all high, and here every token is all "
                "high at first: give hobbit.rule rank beside it, or a hobbit.t1 below 1");
        }
        return {};
    }

    void begin(batch_info & batch, sequence_thresholds & thresholds, bool can_repeat) override {
        std::set<int32_t> lossy; // sequences that draft
        for (const auto & entry : batch.sequences()) {
            const rule_numbers & own = thresholds.own(entry.first);
            if (own[confidence_number] > 0.0 && !own.all_high()) {
                lossy.insert(entry.first);
            }
        }
        const bool is_one_each = batch.sequences().size() == batch.tokens().size();
        const bool is_draft    = can_repeat && !lossy.empty() && is_one_each && batch.has_all_outputs();
        batch.set_pass(is_draft ? batch_pass::draft : batch_pass::only);
        thresholds.raise(is_draft ? std::set<int32_t>() : lossy);
        drafts_ = is_draft ? std::move(lossy) : std::set<int32_t>();
        layers_.clear();
        counts_ = {};
    }

    void keep(const layer_routing & routing, const layer_plan & plan, const step_counts & counts) override {
        layers_.resize(std::max(layers_.size(), size_t(routing.layer) + 1));
        layers_[routing.layer]  = { routing.experts, plan.precisions };
        counts_.skipped        += counts.skipped;
        for (const tier_id tier : TIERS) {
            counts_.selections[tier] += counts.selections[tier];
        }
    }

    bool is_new(const layer_routing & routing, int32_t selection, precision served) const override {
        const drafted_layer & draft = layers_.at(routing.layer);
        const auto            first = selection / routing.n_used * routing.n_used; // first selection of the token
        for (auto i = first; i < first + routing.n_used; i++) {
            if (draft.experts[size_t(i)] == routing.experts[size_t(selection)]) {
                return draft.precisions[size_t(i)] < served;
            }
        }
        return true;
    }

    bool repeats(batch_info & batch, sequence_thresholds & thresholds, const float * logits, size_t n_vocab,
                 stats & counters) override {
        std::set<int32_t> unsure;
        for (size_t i = 0; i < batch.tokens().size(); i++) {
            const int32_t sequence = batch.tokens()[i].sequence;
            const auto    is_sure  = [&] {
                return best_probability(logits + i * n_vocab, n_vocab) > thresholds.own(sequence)[confidence_number];
            };
            if (drafts_.count(sequence) > 0 && !(logits && is_sure())) {
                unsure.insert(sequence);
            }
        }
        if (unsure.empty()) {
            count_selections(counts_, counters);
            return false;
        }
        counters.of("tokens_repeated") += unsure.size();
        batch.set_pass(batch_pass::second);
        thresholds.raise(std::move(unsure));
        return true;
    }

  private:
    struct drafted_layer {
        std::vector<int32_t>   experts;    // [selection]
        std::vector<precision> precisions; // [selection]
    };

    std::set<int32_t>          drafts_; // sequences with a draft
    std::vector<drafted_layer> layers_; // [layer]
    step_counts                counts_; // the draft's selections
};

[[maybe_unused]] const auto maker =
    make_passes = []() -> std::unique_ptr<batch_passes> { return std::make_unique<second_pass>(); };

} // namespace

} // namespace hobbit
