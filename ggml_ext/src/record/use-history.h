// SPDX-License-Identifier: MIT
#pragma once

#include "model/expert-index.h"
#include "model/use-counts.h"

#include <string>

namespace hobbit {

// How often the calibration and earlier runs used each expert, and the file beside the model that runs add to.
//
// Thread-safety: none.
class use_history {
  public:
    // The index must outlive the object.
    explicit use_history(const expert_index & index) : index_(index) {}

    // Reads what is known. `path`: of the model. `keeps_file`: reads and writes the file beside it.
    void recall(const std::string & path, bool keeps_file);

    // Uses per token before this run; empty if unknown.
    const expert_table<float> & rates() const { return rates_; }

    // The index has other numbers of experts of a token since recall().
    void recount();

    // Counts for a run of the model.
    use_counts none() const;

    // Adds a run's counts to the file, if it is kept.
    void remember(const use_counts & run) const;

  private:
    const expert_index & index_;
    std::string          path_;   // path of the file; empty: no counts are kept
    std::vector<int32_t> counts_; // known before this run
    expert_table<float>  rates_;
};

} // namespace hobbit
