// SPDX-License-Identifier: MIT
#include "cache/resident-tiers.h"

#include "policy/cache-policy.h"

#include <doctest/doctest.h>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace hobbit;

struct tier_expert {
    expert_id id;
    tier_id   tier;
};

static constexpr uint32_t N_EXPERTS = 8;

struct tiers {
    cache_policy             policy;
    resident_tiers           sets;
    std::vector<expert_term> evicted;

    tiers(bool residual, uint32_t n_high, uint32_t n_low) :
        sets(terms_of(residual ? tier_kind::residual : tier_kind::complete)) {
        sets.add(term_id::high, resident_set(1, N_EXPERTS, term_id::high, n_high, 0, policy));
        sets.add(term_id::low, resident_set(1, N_EXPERTS, term_id::low, n_low, 0, policy));
    }

    bool insert(uint32_t expert, tier_id tier) { return sets.insert({ 0, expert }, tier, 0, evicted); }

    // Resident versions: "h" and "l" by expert.
    std::string content() const {
        std::string text;
        for (uint32_t e = 0; e < N_EXPERTS; e++) {
            const bool high  = sets.set(term_id::high).contains({ 0, e });
            const bool low   = sets.set(term_id::low).contains({ 0, e });
            text            += high || low ? std::to_string(e) + (high ? "h" : "") + (low ? "l " : " ") : "";
        }
        return text;
    }

    // Those since the last call.
    std::string evictions() {
        std::string text;
        for (const expert_term & e : evicted) {
            text += std::to_string(e.id.expert) + (e.term == term_id::high ? "h " : "l ");
        }
        evicted.clear();
        return text;
    }
};

TEST_CASE("complete tiers have nothing to do with each other") {
    tiers t(false, 2, 2);
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

TEST_CASE("an upgrade adds the residual alone, and a low version takes its residual along") {
    tiers t(true, 2, 3);
    CHECK(t.insert(0, tier_id::low));
    CHECK_FALSE(t.sets.contains({ 0, 0 }, tier_id::high));
    CHECK(t.insert(0, tier_id::high));
    CHECK(t.content() == "0hl ");
    CHECK(t.sets.contains({ 0, 0 }, tier_id::high));
    CHECK(t.sets.contains({ 0, 0 }, tier_id::low));
    CHECK(t.insert(1, tier_id::high));
    CHECK(t.insert(2, tier_id::low));
    CHECK(t.evictions().empty());
    CHECK(t.insert(3, tier_id::low));
    CHECK(t.evictions() == "0l 0h ");
    CHECK(t.content() == "1hl 2l 3l ");
}

TEST_CASE("a residual gives way and its low version stays") {
    tiers t(true, 1, 3);
    CHECK(t.insert(0, tier_id::high));
    CHECK(t.insert(1, tier_id::high));
    CHECK(t.evictions() == "0h ");
    CHECK(t.content() == "0l 1hl ");
}

TEST_CASE("nothing changes where one of the two pools has no room") {
    tiers t(true, 1, 2);
    CHECK(t.insert(0, tier_id::high));
    t.sets.pin({ 0, 0 }, tier_id::high);
    CHECK_FALSE(t.insert(1, tier_id::high));
    CHECK(t.content() == "0hl ");
    CHECK(t.insert(1, tier_id::low));
    CHECK(t.insert(2, tier_id::low)); // not 0, which is pinned in both pools
    CHECK(t.content() == "0hl 2l ");
    t.sets.unpin({ 0, 0 }, tier_id::high);
    CHECK(t.insert(1, tier_id::high));
    CHECK(t.content() == "1hl 2l ");
}

TEST_CASE("no residual without its low version") {
    tiers t(true, 2, 2);
    CHECK_FALSE(t.sets.insert_term({ 0, 0 }, term_id::high, 0, resident_set::pressure::polite, t.evicted));
    CHECK(t.sets.insert_term({ 0, 0 }, term_id::low, 0, resident_set::pressure::polite, t.evicted));
    CHECK(t.sets.insert_term({ 0, 0 }, term_id::high, 0, resident_set::pressure::polite, t.evicted));
    t.sets.erase_term({ 0, 0 }, term_id::low, t.evicted);
    CHECK(t.content().empty());
    CHECK(t.evictions() == "0l 0h ");
}

TEST_CASE("protection holds for both terms") {
    tiers t(true, 2, 2);
    CHECK(t.insert(0, tier_id::high));
    t.sets.protect({ 0, 0 }, tier_id::high);
    CHECK(t.insert(1, tier_id::high));
    CHECK(t.insert(2, tier_id::high));
    CHECK(t.content() == "0hl 2hl ");
    t.sets.end_protection(0, N_EXPERTS);
    CHECK(t.insert(3, tier_id::high));
    CHECK(t.content() == "2hl 3hl ");
}

TEST_CASE("protection ends for all experts of the layer") {
    tiers t(false, 1, 1);
    CHECK(t.insert(N_EXPERTS - 1, tier_id::high));
    t.sets.protect({ 0, N_EXPERTS - 1 }, tier_id::high);
    const auto polite = [&] {
        return t.sets.insert_term({ 0, 0 }, term_id::high, 0, resident_set::pressure::polite, t.evicted);
    };
    CHECK_FALSE(polite());
    t.sets.end_protection(0, N_EXPERTS);
    CHECK(polite());
}

TEST_CASE("a duplicate leaves before what was used longer ago") {
    tiers t(false, 1, 2);
    CHECK(t.insert(0, tier_id::low));
    CHECK(t.insert(1, tier_id::low));
    t.sets.set_duplicate({ 0, 1 }, tier_id::low, true);
    CHECK(t.insert(2, tier_id::low));
    CHECK(t.content() == "0l 2l ");

    resident_tiers high_alone(terms_of(tier_kind::complete));
    high_alone.add(term_id::high, resident_set(1, N_EXPERTS, term_id::high, 1, 0, t.policy));
    high_alone.set_duplicate({ 0, 0 }, tier_id::low, true);
    CHECK_FALSE(high_alone.contains({ 0, 0 }, tier_id::low));
}

TEST_CASE("whatever is done, no residual is without its low version, nor pinned more often") {
    std::mt19937 random(5);
    for (int run = 0; run < 40; run++) {
        const uint32_t               n_low  = 1 + random() % 6;
        const uint32_t               n_high = 1 + random() % n_low;
        tiers                        t(true, n_high, n_low);
        std::vector<tier_expert>     pinned;
        std::map<uint32_t, uint32_t> n_pins; // [expert]
        for (int step = 0; step < 300; step++) {
            const tier_expert e{ { 0, uint32_t(random() % N_EXPERTS) }, tier_id(random() % TIERS.size()) };
            if (random() % 3 == 0 && !pinned.empty()) {
                const size_t      i    = random() % pinned.size();
                const tier_expert last = pinned[i];
                t.sets.unpin(last.id, last.tier);
                n_pins[last.id.expert]--;
                pinned.erase(pinned.begin() + ptrdiff_t(i));
            } else if (t.insert(e.id.expert, e.tier)) {
                REQUIRE(t.sets.contains(e.id, e.tier));
                t.sets.pin(e.id, e.tier);
                n_pins[e.id.expert]++;
                pinned.push_back(e);
            }
            for (uint32_t expert = 0; expert < N_EXPERTS; expert++) {
                const expert_id id = { 0, expert };
                REQUIRE((!t.sets.set(term_id::high).contains(id) || t.sets.set(term_id::low).contains(id)));
                REQUIRE((!t.sets.set(term_id::high).is_pinned(id) || t.sets.set(term_id::low).is_pinned(id)));
                REQUIRE(t.sets.set(term_id::low).is_pinned(id) == (n_pins[expert] > 0));
            }
            REQUIRE(t.sets.set(term_id::low).n_residents() <= n_low);
            REQUIRE(t.sets.set(term_id::high).n_residents() <= n_high);
        }
    }
}
