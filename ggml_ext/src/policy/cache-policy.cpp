// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>

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

token_memory::token_memory(uint32_t n_layers, uint32_t n_experts, uint32_t n_used, uint32_t capacity) :
    n_layers_(n_layers),
    n_experts_(n_experts),
    n_used_(n_used),
    capacity_(capacity),
    routes_(size_t(capacity) * n_layers * n_used),
    n_routes_(size_t(capacity) * n_layers, 0),
    roots_(size_t(n_layers) * n_experts * capacity, 0),
    before_(capacity, none),
    after_(capacity, none) {}

uint64_t token_memory::add(uint64_t before) {
    const uint64_t token = n_added_;
    visit_uses(token, [&](expert_id id) { root(id, slot(token)) = 0; }); // the slot's old token used it
    std::fill_n(n_routes_.begin() + ptrdiff_t(row(token, 0)), n_layers_, 0);
    n_added_++;
    before_[slot(token)] = known(before);
    after_[slot(token)]  = none;
    if (remembers(before)) {
        after_[slot(before)] = token;
    }
    return token;
}

void token_memory::use(uint64_t token, expert_id id, double weight) {
    GGML_ASSERT(remembers(token));
    const size_t i = row(token, id.layer);
    if (n_routes_[i] == n_used_) {
        return;
    }
    routes_[i * n_used_ + n_routes_[i]++] = uint16_t(id.expert);
    root(id, slot(token))                 = uint8_t(std::lround(255 * std::sqrt(std::clamp(weight, 0.0, 1.0))));
}

void token_memory::add_similarity(expert_id id, double weight, std::vector<float> & scores) const {
    const float     scale = float(std::sqrt(std::clamp(weight, 0.0, 1.0)) / 255);
    const uint8_t * roots = &roots_[(size_t(id.layer) * n_experts_ + id.expert) * capacity_];
    for (uint32_t slot = 0; slot < capacity_; slot++) {
        scores[slot] += scale * float(roots[slot]);
    }
}

} // namespace hobbit
