// SPDX-License-Identifier: MIT
#pragma once

#include "plan/batch-info.h"
#include "plan/precision-rule.h"

#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace hobbit {

// The thresholds in force: a sequence's own, or else the common ones, unless it is raised. Thread-safety: none.
class sequence_thresholds {
  public:
    explicit sequence_thresholds(const score_thresholds & common = {}) : common_(common) {}

    void set(const score_thresholds & common) { common_ = common; }

    void set(int32_t sequence, const score_thresholds & own) { own_[sequence] = own; }

    // Clears the sequences from `first` up to `end`.
    void clear(int32_t first, int32_t end) { own_.erase(own_.lower_bound(first), own_.lower_bound(end)); }

    // These sequences are in high precision until the next call.
    void raise(std::set<int32_t> sequences) { raised_ = std::move(sequences); }

    // The sequence's own thresholds, raised or not.
    const score_thresholds & own(int32_t sequence) const {
        const auto found = own_.find(sequence);
        return found == own_.end() ? common_ : found->second;
    }

    const score_thresholds & of(int32_t sequence) const {
        static const score_thresholds all_high;
        return raised_.count(sequence) > 0 ? all_high : own(sequence);
    }

    // [row]
    std::vector<score_thresholds> of(const std::vector<batch_info::row> & rows) const;

    // Thresholds that satisfy every sequence of the batch; the common ones if it names none.
    score_thresholds highest(const batch_info & batch) const;

  private:
    score_thresholds                    common_;
    std::map<int32_t, score_thresholds> own_; // [sequence]
    std::set<int32_t>                   raised_;
};

} // namespace hobbit
