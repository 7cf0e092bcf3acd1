// SPDX-License-Identifier: MIT
#pragma once

#include "policy/cache-policy.h"

#include <cstdint>
#include <map>

namespace hobbit {

// How a sequence has used one expert.
struct usage_record {
    uint32_t last_token  = 0; // number of the last token that used it, from 1; in a batch, the batch's last; 0: none
    uint32_t n_uses      = 0; // tokens
    uint32_t n_high_uses = 0; // tokens that it served in high precision
};

// The usage records of every sequence in progress. No call ends a sequence, so it is forgotten after `n_idle_max` calls
// of begin_tokens for others. Thread-safety: none.
class usage_records {
  public:
    static constexpr uint64_t n_idle_max = 256;

    usage_records(uint32_t n_layers, uint32_t n_experts) : n_layers_(n_layers), n_experts_(n_experts) {}

    // See cache_policy. begin_sequence may be left out for a new sequence.
    void begin_sequence(uint32_t sequence);
    void begin_tokens(uint32_t sequence, uint32_t n);
    void on_use(const expert_usage & use);

    // The largest score(record, tokens of the sequence) over all sequences; 0 without any.
    template <typename Score>
    double largest(expert_id id, Score score) const {
        double most = 0.0;
        for (const auto & [number, s] : sequences_) {
            const double value = score(s.records[id], s.n_tokens);
            most               = value > most ? value : most;
        }
        return most;
    }

    size_t n_sequences() const { return sequences_.size(); }

  private:
    struct sequence {
        uint32_t                   n_tokens = 0;
        uint64_t                   last_run = 0;
        expert_table<usage_record> records;
    };

    sequence & find(uint32_t number);

    const uint32_t               n_layers_;
    const uint32_t               n_experts_;
    std::map<uint32_t, sequence> sequences_;  // [number]
    uint64_t                     n_runs_ = 0; // calls of begin_tokens
};

} // namespace hobbit
