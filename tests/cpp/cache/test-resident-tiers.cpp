// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

#include "policy/cache-policy.h"

#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

static constexpr uint32_t N_EXPERTS = 8;

struct tiers {
    cache_policy             policy;
    resident_tiers           sets;
    std::vector<expert_tier> evicted;

    tiers(uint32_t n_high, uint32_t n_low) {
        sets.add(tier_id::high, resident_set(1, N_EXPERTS, tier_id::high, n_high, 0, policy));
        sets.add(tier_id::low, resident_set(1, N_EXPERTS, tier_id::low, n_low, 0, policy));
    }

    bool insert(uint32_t expert, tier_id tier) {
        return sets.insert({ 0, expert }, tier, 0, resident_set::pressure::urgent, evicted);
    }

    // Resident versions: "h" and "l" by expert.
    std::string content() const {
        std::string text;
        for (uint32_t e = 0; e < N_EXPERTS; e++) {
            const bool high  = sets.set(tier_id::high).contains({ 0, e });
            const bool low   = sets.set(tier_id::low).contains({ 0, e });
            text            += high || low ? std::to_string(e) + (high ? "h" : "") + (low ? "l " : " ") : "";
        }
        return text;
    }

    // Those since the last call.
    std::string evictions() {
        std::string text;
        for (const expert_tier & e : evicted) {
            text += std::to_string(e.id.expert) + (e.tier == tier_id::high ? "h " : "l ");
        }
        evicted.clear();
        return text;
    }
};

TEST_CASE("tiers have nothing to do with each other") {
    tiers t(2, 2);
    CHECK(t.insert(0, tier_id::high));
    CHECK(t.content() == "0h ");
    CHECK(t.sets.contains({ 0, 0 }, tier_id::high));
    CHECK_FALSE(t.sets.contains({ 0, 0 }, tier_id::low));
    CHECK(t.insert(0, tier_id::low));
    CHECK(t.insert(1, tier_id::low));
    CHECK(t.insert(2, tier_id::low));
    CHECK(t.evictions() == "0l ");
    CHECK(t.content() == "0h 1l 2l ");
}

TEST_CASE("protection ends for all experts of the layer") {
    tiers t(1, 1);
    CHECK(t.insert(N_EXPERTS - 1, tier_id::high));
    t.sets.protect({ 0, N_EXPERTS - 1 }, tier_id::high);
    const auto polite = [&] {
        return t.sets.insert({ 0, 0 }, tier_id::high, 0, resident_set::pressure::polite, t.evicted);
    };
    CHECK_FALSE(polite());
    t.sets.end_protection(0, N_EXPERTS);
    CHECK(polite());
}

TEST_CASE("a duplicate leaves before what was used longer ago") {
    tiers t(1, 2);
    CHECK(t.insert(0, tier_id::low));
    CHECK(t.insert(1, tier_id::low));
    t.sets.set_duplicate({ 0, 1 }, tier_id::low, true);
    CHECK(t.insert(2, tier_id::low));
    CHECK(t.content() == "0l 2l ");

    resident_tiers high_alone;
    high_alone.add(tier_id::high, resident_set(1, N_EXPERTS, tier_id::high, 1, 0, t.policy));
    high_alone.set_duplicate({ 0, 0 }, tier_id::low, true);
    CHECK_FALSE(high_alone.contains({ 0, 0 }, tier_id::low));
}
