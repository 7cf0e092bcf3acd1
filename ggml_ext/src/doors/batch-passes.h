// SPDX-License-Identifier: MIT
#pragma once

#include "base/stats.h"
#include "base/status.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hobbit {

// Decides whether a batch is computed once or as a draft that a second pass may follow, and keeps what the draft has
// told policies, records and counters: to these both passes are one batch.
//
// Thread-safety: none.
class batch_passes {
  public:
    virtual ~batch_passes() = default;

    // Fails if these numbers ask for a second pass that cannot be. can_repeat: the model's memory of a token can be
    // overwritten.  model: its path
    virtual status check(const rule_numbers & own, bool can_repeat, const std::string & model) const = 0;

    // A batch begins: sets its pass and raises sequences. can_repeat: the caller asks repeats() after the draft, and
    // can compute the batch again.
    virtual void begin(batch_info & batch, sequence_thresholds & thresholds, bool can_repeat) = 0;

    // The draft's uses in one layer. Its selections are counted if it is kept.
    virtual void keep(const layer_routing & routing, const layer_plan & plan, const step_counts & counts) = 0;

    // Did the draft not use the selection's expert for the same token, or in less than this precision?
    virtual bool is_new(const layer_routing & routing, int32_t selection, precision served) const = 0;

    // Returns true if the second pass begins behind the draft. Counts the tokens that are computed again, or the
    // selections of a draft that is kept. logits: [token][n_vocab]; null: they are not known
    virtual bool repeats(batch_info & batch, sequence_thresholds & thresholds, const float * logits, size_t n_vocab,
                         stats & counters) = 0;
};

// Makes a model's passes. A mechanism that has any sets it, in an object of static storage; null: each batch has one.
inline std::unique_ptr<batch_passes> (*make_passes)() = nullptr;

} // namespace hobbit
