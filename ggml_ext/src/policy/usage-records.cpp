// SPDX-License-Identifier: MIT
#include "policy/usage-records.h"

namespace hobbit {

void usage_records::begin_sequence(uint32_t number) {
    sequences_.erase(number);
    find(number);
}

void usage_records::begin_tokens(uint32_t number, uint32_t n) {
    n_runs_++;
    sequence & s  = find(number);
    s.n_tokens   += n;
    s.last_run    = n_runs_;
    for (auto other = sequences_.begin(); other != sequences_.end();) {
        const bool is_idle = n_runs_ - other->second.last_run > n_idle_max;
        other              = is_idle ? sequences_.erase(other) : std::next(other);
    }
}

void usage_records::on_use(const expert_usage & use) {
    sequence &     s  = find(use.sequence);
    usage_record & r  = s.records[use.id];
    r.last_token      = s.n_tokens;
    r.n_uses         += use.n_tokens;
    r.n_high_uses    += use.tier == tier_id::high ? use.n_tokens : 0;
}

usage_records::sequence & usage_records::find(uint32_t number) {
    const auto [at, is_new] = sequences_.try_emplace(number);
    if (is_new) {
        at->second = { 0, n_runs_, { n_layers_, n_experts_ } };
    }
    return at->second;
}

} // namespace hobbit
