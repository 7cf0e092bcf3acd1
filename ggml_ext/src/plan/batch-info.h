// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace hobbit {

// A batch is computed once, or as a draft that a second pass may follow; see batch_passes.
enum class batch_pass { only, draft, second };

// The tokens of the current batch, as llama.cpp announced them. If it announced none, every token belongs to sequence 0
// at position -1.
class batch_info {
  public:
    // A batch of more tokens counts as part of a prompt.
    static constexpr int64_t max_generated = 16;

    void begin(uint32_t n_tokens, const int32_t * sequences, const int32_t * positions, const int8_t * outputs);

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
    std::vector<row> rows(int64_t n_rows) const;

  private:
    std::vector<row>            tokens_;
    std::vector<row>            outputs_; // the tokens that have an output
    std::map<int32_t, uint32_t> n_tokens_;
    batch_pass                  pass_ = batch_pass::only;
};

} // namespace hobbit
