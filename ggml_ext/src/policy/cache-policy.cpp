// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <utility>

namespace hobbit {

namespace {

class scored_pool : public pool_policy {
  public:
    scored_pool(cache_policy & policy, tier_id tier) : policy_(policy), tier_(tier) {}

    bool   admits(expert_id newcomer, expert_id victim) override { return policy_.admits(newcomer, victim); }
    double value(expert_id id, layer_id running) override { return policy_.value(id, tier_, running); }

  private:
    cache_policy & policy_;
    const tier_id  tier_;
};

} // namespace

// Asks for each value once: those of the random policy change.
template <typename Better>
static expert_id best(pool_policy & pool, const std::vector<candidate> & candidates, layer_id running, Better better) {
    using rank         = std::pair<double, uint64_t>; // value, touched
    const auto rank_of = [&](const candidate & c) { return rank(pool.value(c.id, running), c.touched); };
    rank       first   = rank_of(candidates.front());
    expert_id  found   = candidates.front().id;
    for (size_t i = 1; i < candidates.size(); i++) {
        const rank r = rank_of(candidates[i]);
        if (better(r, first)) {
            first = r;
            found = candidates[i].id;
        }
    }
    return found;
}

expert_id pool_policy::victim(const std::vector<candidate> & candidates, layer_id running) {
    return best(*this, candidates, running, std::less<>());
}

expert_id pool_policy::most_valuable(const std::vector<candidate> & candidates, layer_id running) {
    return best(*this, candidates, running, std::greater<>());
}

std::unique_ptr<pool_policy> cache_policy::make_pool(tier_id tier) {
    return std::make_unique<scored_pool>(*this, tier);
}

} // namespace hobbit
