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

} // namespace hobbit
