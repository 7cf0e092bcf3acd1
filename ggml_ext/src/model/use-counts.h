// SPDX-License-Identifier: MIT
#pragma once

#include "base/status.h"
#include "model/expert.h"

#include <cstdint>
#include <string>
#include <vector>

namespace hobbit {

// How often tokens chose each expert of a model. Runs of a model keep their counts in a file beside it
// (docs/format.md). A layer's counts are halved when they exceed those of most_tokens, so that old text fades.
//
// Thread-safety: none.
class use_counts {
  public:
    static constexpr const char * suffix      = ".hobbit-uses"; // suffix of the file's name; see beside_model
    static constexpr int64_t      most_tokens = 8192;

    use_counts() = default;
    use_counts(std::vector<uint32_t> n_used, uint32_t n_experts); // n_used: [layer], of a token; above 0

    // Choices of some tokens in a layer, in any order.
    void add(layer_id layer, const std::vector<int32_t> & experts);

    // As many counts as these, [layer][expert]. REQUIRES: none is negative
    void                         add(const std::vector<int32_t> & counts);
    const std::vector<int32_t> & counts() const { return counts_; }

    // Uses per token; empty if nothing was counted.
    expert_table<float> rates() const;

    // Adds the counts in the file, if there is one. Fails, and adds nothing, if they are not of this model.
    status read(const std::string & path, uint64_t model_bytes);

    // Whoever reads the file sees the old one or the new one, whole.
    status write(const std::string & path, uint64_t model_bytes) const;

  private:
    void halve(layer_id layer);

    std::vector<uint32_t> n_used_; // [layer]
    uint32_t              n_experts_ = 0;
    std::vector<int32_t>  counts_; // [layer][expert]
    std::vector<int64_t>  sums_;   // [layer]
};

// The experts that are used at all, the most used ones first.
std::vector<expert_id> most_used(const expert_table<float> & rates);

} // namespace hobbit
