// SPDX-License-Identifier: MIT
#include "plan/batch-info.h"

namespace hobbit {

void batch_info::begin(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions,
                       const int8_t * outputs) {
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

std::vector<batch_info::row> batch_info::rows(int64_t n_rows) const {
    if (n_rows == int64_t(tokens_.size())) {
        return tokens_;
    }
    if (n_rows == int64_t(outputs_.size())) {
        return outputs_;
    }
    return std::vector<row>(size_t(n_rows), { 0, -1 });
}

std::vector<rule_numbers> sequence_thresholds::of(const std::vector<batch_info::row> & rows) const {
    std::vector<rule_numbers> all;
    for (const batch_info::row & row : rows) {
        all.push_back(of(row.sequence));
    }
    return all;
}

rule_numbers sequence_thresholds::highest(const batch_info & batch) const {
    if (batch.sequences().empty()) {
        return common_;
    }
    rule_numbers most = of(batch.sequences().begin()->first);
    for (const auto & entry : batch.sequences()) {
        most = rule_numbers::higher(most, of(entry.first));
    }
    return most;
}

} // namespace hobbit
