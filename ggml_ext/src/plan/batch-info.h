// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace hobbit {

// The tokens of the batch in hand, as llama.cpp announced them. Where it announced none, every token is of sequence 0
// at position -1.
class batch_info {
  public:
    void begin(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions, const int8_t * outputs);

    // Sequence and position of a token.
    struct row {
        int32_t sequence;
        int32_t position;
    };

    const std::vector<row> & tokens() const { return tokens_; }

    // Sequences of the batch, and how many tokens each has in it.
    const std::map<int32_t, uint32_t> & sequences() const { return n_tokens_; }

    // The tokens of a layer with so many rows: all, or (the last layer) those whose output is wanted.
    std::vector<row> rows(int64_t n_rows) const;

  private:
    std::vector<row>            tokens_;
    std::vector<row>            outputs_; // of tokens_, those whose output is wanted
    std::map<int32_t, uint32_t> n_tokens_;
};

} // namespace hobbit
