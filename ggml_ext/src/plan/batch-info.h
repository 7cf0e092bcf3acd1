// SPDX-License-Identifier: MIT
#pragma once

#include "plan/precision-rule.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace hobbit {

// A batch is computed once, or as a draft that a second pass may follow; see batch_passes.
enum class batch_pass { only, draft, second };

// The tokens of the current batch, as llama.cpp announced them; if it did not, all are of sequence 0 at position -1.
class batch_info {
  public:
    // A batch of more tokens counts as part of a prompt.
    static constexpr int64_t max_generated = 16;

    void begin(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions, const int8_t * outputs) {
        tokens_.clear();
        outputs_.clear();
        n_tokens_.clear();
        for (uint32_t i = 0; i < n_tokens; i++) {
            tokens_.push_back({ sequences[i], positions[i] });
            n_tokens_[sequences[i]]++;
            if (outputs[i]) {
                outputs_.push_back(tokens_.back());
            }
        }
    }

    // A token's place.
    struct row {
        int32_t sequence;
        int32_t position;
    };

    const std::vector<row> & tokens() const { return tokens_; }

    bool has_all_outputs() const { return outputs_.size() == tokens_.size(); }

    // The one that runs, or ran last.
    batch_pass pass() const { return pass_; }
    void       set_pass(batch_pass pass) { pass_ = pass; }

    // The sequences of the batch and their numbers of tokens.
    const std::map<int32_t, uint32_t> & sequences() const { return n_tokens_; }

    // The tokens of a layer that computes n_rows of them: all, or in the last layer those with an output.
    std::vector<row> rows(int64_t n_rows) const {
        if (n_rows == int64_t(tokens_.size())) {
            return tokens_;
        }
        if (n_rows == int64_t(outputs_.size())) {
            return outputs_;
        }
        return std::vector<row>(size_t(n_rows), { 0, -1 });
    }

  private:
    std::vector<row>            tokens_;
    std::vector<row>            outputs_; // the tokens that have an output
    std::map<int32_t, uint32_t> n_tokens_;
    batch_pass                  pass_ = batch_pass::only;
};

// The thresholds in force: a sequence's own, or else the common ones, unless it is raised. Thread-safety: none.
class sequence_thresholds {
  public:
    explicit sequence_thresholds(const rule_numbers & common = {}) : common_(common) {}

    void set(const rule_numbers & common) { common_ = common; }

    void set(int32_t sequence, const rule_numbers & own) { own_[sequence] = own; }

    // Clears the sequences from `first` up to `end`.
    void clear(int32_t first, int32_t end) { own_.erase(own_.lower_bound(first), own_.lower_bound(end)); }

    // These sequences are in high precision until the next call.
    void raise(std::set<int32_t> sequences) { raised_ = std::move(sequences); }

    // The sequence's own thresholds, raised or not.
    const rule_numbers & own(int32_t sequence) const {
        const auto found = own_.find(sequence);
        return found == own_.end() ? common_ : found->second;
    }

    const rule_numbers & of(int32_t sequence) const {
        static const rule_numbers all_high;
        return raised_.count(sequence) > 0 ? all_high : own(sequence);
    }

    // [row]
    std::vector<rule_numbers> of(const std::vector<batch_info::row> & rows) const {
        std::vector<rule_numbers> all;
        for (const batch_info::row & row : rows) {
            all.push_back(of(row.sequence));
        }
        return all;
    }

    // Thresholds that satisfy every sequence of the batch; the common ones if it names none.
    rule_numbers highest(const batch_info & batch) const {
        if (batch.sequences().empty()) {
            return common_;
        }
        rule_numbers most = of(batch.sequences().begin()->first);
        for (const auto & entry : batch.sequences()) {
            most = rule_numbers::higher(most, of(entry.first));
        }
        return most;
    }

  private:
    rule_numbers                    common_;
    std::map<int32_t, rule_numbers> own_; // [sequence]
    std::set<int32_t>               raised_;
};

} // namespace hobbit
