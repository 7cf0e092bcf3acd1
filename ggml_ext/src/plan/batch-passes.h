// SPDX-License-Identifier: MIT
#pragma once

#include "base/registered.h"
#include "plan/batch-info.h"
#include "plan/layer-step.h"
#include "plan/sequence-thresholds.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace hobbit {

struct judge_options {
    std::string name;
};

// Decides which tokens are computed a second time, all high. Pure.
class token_judge {
  public:
    virtual ~token_judge() = default;

    // Returns true if tokens of a sequence with these thresholds are drafts, which the judge then looks at.
    virtual bool drafts(const score_thresholds & own) const = 0;

    // Returns true if a draft is kept. REQUIRES: drafts(own)
    virtual bool keeps(const score_thresholds & own, const float * logits, size_t n_vocab) const = 0;
};

// The first one by name serves.
using registered_judge = registered<token_judge, judge_options>;

// The passes over the current batch: one, or a draft. If the registered judge does not keep the draft, a second pass
// computes it with all experts in high precision. To policies, records and counters both passes are one batch, so this
// class knows what the draft has told them.
//
// Drafts are batches of one token per sequence whose logits are wanted. Everything else of a sequence that drafts is in
// high precision: prompts, and the tokens that speculative decoding proposes.
//
// Thread-safety: none.
class batch_passes {
  public:
    batch_passes();

    // A batch begins: sets its pass and raises sequences. `can_repeat`: the caller asks judge() after the draft, and
    // can compute the batch again.
    void begin(batch_info & batch, sequence_thresholds & thresholds, bool can_repeat);

    // The draft's uses in one layer. Its selections are counted if it is kept.
    void keep(const layer_routing & routing, const layer_plan & plan, const step_counts & counts);

    // Returns true if the draft did not use the selection's expert for the same token, or used it in less than this
    // precision.
    bool is_new(const layer_routing & routing, int32_t selection, precision served) const;

    // Begins the second pass if a token of the draft is unsure, and returns the number of such tokens.
    // logits: [token][n_vocab]; null: all tokens are unsure.
    uint64_t judge(batch_info & batch, sequence_thresholds & thresholds, const float * logits, size_t n_vocab) const;

    // The draft's selections.
    const step_counts & counts() const { return counts_; }

  private:
    struct drafted_layer {
        std::vector<int32_t>   experts;    // [selection]
        std::vector<precision> precisions; // [selection]
    };

    std::shared_ptr<token_judge> judge_;  // null: each batch has one pass
    std::set<int32_t>            drafts_; // sequences with a draft
    std::vector<drafted_layer>   layers_; // [layer]
    step_counts                  counts_;
};

} // namespace hobbit
