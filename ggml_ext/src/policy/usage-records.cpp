// SPDX-License-Identifier: MIT
#include "policy/usage-records.h"

#include "model/expert-index.h"

#include <algorithm>

namespace hobbit {

void usage_records::begin_sequence(uint32_t number) {
    sequence & s = find(number);
    s.n_tokens   = 0;
    std::fill(s.records.begin(), s.records.end(), usage_record{});
    std::fill(s.layer_uses.begin(), s.layer_uses.end(), 0);
}

void usage_records::begin_tokens(uint32_t number, uint32_t n) {
    n_runs_++;
    sequence & s        = find(number);
    s.n_tokens         += n;
    s.last_run          = n_runs_;
    const auto is_idle  = [&](const sequence & other) { return n_runs_ - other.last_run > n_idle_max; };
    sequences_.erase(std::remove_if(sequences_.begin(), sequences_.end(), is_idle), sequences_.end());
}

void usage_records::on_use(const expert_usage & use) {
    sequence &     s            = find(use.sequence);
    usage_record & r            = s.records[index(use.id)];
    r.last_token                = s.n_tokens;
    r.n_uses                   += use.n_tokens;
    r.n_high_uses              += use.tier == tier_id::high ? use.n_tokens : 0;
    s.layer_uses[use.id.layer] += use.n_tokens;
}

usage_records::sequence & usage_records::find(uint32_t number) {
    const auto found =
        std::find_if(sequences_.begin(), sequences_.end(), [&](const sequence & s) { return s.number == number; });
    if (found != sequences_.end()) {
        return *found;
    }
    sequence s;
    s.number   = number;
    s.last_run = n_runs_;
    s.records.resize(size_t(n_layers_) * n_experts_);
    s.layer_uses.resize(n_layers_);
    sequences_.push_back(std::move(s));
    return sequences_.back();
}

} // namespace hobbit
