// SPDX-License-Identifier: MIT
#include "offload/bypass-estimate.h"

#include "policy/cache-policy.h"

#include <doctest/doctest.h>
#include <random>
#include <set>
#include <vector>

using namespace hobbit;

static constexpr uint32_t N_EXPERTS = 2000;

// Some experts are worth less than the others.
class few_worthless_policy : public cache_policy {
  public:
    double value(expert_id id, term_id, layer_id) override { return worthless.count(id.expert) > 0 ? 0.0 : 1.0; }

    std::set<uint32_t> worthless;
};

// Pools of one layer's experts, of equal size; the least recently used goes first.
struct pool {
    few_worthless_policy     policy;
    resident_tiers           sets;
    std::vector<expert_term> evicted;
    bypass_estimate          estimate{ sets };

    explicit pool(uint32_t n_slots, bool residual = false) :
        sets(terms_of(residual ? tier_kind::residual : tier_kind::complete)) {
        for (const term_id term : TERMS) {
            sets.add(term, resident_set(1, N_EXPERTS, term, n_slots, 0, policy));
        }
    }

    static tier_expert high(uint32_t expert) { return { { 0, expert }, tier_id::high }; }

    bool has(uint32_t expert) const { return sets.contains({ 0, expert }, tier_id::high); }

    void insert(uint32_t expert) {
        sets.insert({ 0, expert }, tier_id::high, 0, evicted);
        sets.touch({ 0, expert }, tier_id::high);
    }

    // What a layer uses; of what is missed the odd numbers bypass the pool, the even ones, or both, or none.
    void use(const std::vector<uint32_t> & experts, bool odd_bypass = true, bool even_bypass = true) {
        std::vector<bypass_estimate::use> uses;
        for (const uint32_t e : experts) {
            uses.push_back({ high(e), !has(e) });
        }
        estimate.begin_layer(0, uses);
        for (const bypass_estimate::use & u : uses) {
            const uint32_t e = u.expert.id.expert;
            if (u.is_missed && (e % 2 ? odd_bypass : even_bypass)) {
                estimate.bypassed(u.expert);
            } else {
                insert(e);
            }
        }
    }

    // Experts that come so many times one after the other, and not again.
    void use_runs(uint32_t first, uint32_t n, uint32_t length, bool odd_bypass = true, bool even_bypass = true) {
        for (uint32_t e = first; e < first + n; e++) {
            for (uint32_t i = 0; i < length; i++) {
                use({ e }, odd_bypass, even_bypass);
            }
        }
    }

    double further_misses() const { return estimate.further_misses(); }
};

static doctest::Approx about(double value) {
    return doctest::Approx(value).epsilon(0.1);
}

TEST_CASE("nothing is known before some have bypassed the pool") {
    pool p(16);
    p.use_runs(0, 100, 3, false, false);
    CHECK(p.further_misses() == 0.0);
    for (uint32_t i = 0; i < 40; i++) {
        CHECK((i >= 16 || p.further_misses() == 0.0));
        p.use({ 1000 });
    }
    CHECK(p.further_misses() > 0.9);
}

// A run of n that bypasses the pool is missed n times in place of once.
TEST_CASE("of n misses of what is used n times all but one follow from bypassing the pool") {
    for (const uint32_t n : { 1, 2, 3, 8 }) {
        for (const bool half : { false, true }) {
            CAPTURE(n);
            CAPTURE(half);
            pool p(16);
            p.use_runs(0, 1000, n, true, !half);
            CHECK(p.further_misses() == about(1.0 - 1.0 / n));
        }
    }
}

TEST_CASE("where any expert may be the next one, it does no harm") {
    pool         p(100);
    std::mt19937 random(3);
    for (int i = 0; i < 5000; i++) {
        p.use({ uint32_t(random() % 200) }, true, i % 10 < 9);
    }
    CHECK(p.further_misses() < 0.2);
}

TEST_CASE("what was learnt is forgotten when the text is another one") {
    pool p(16);
    p.use_runs(0, 50, 4);
    CHECK(p.further_misses() > 0.6);
    p.use_runs(100, 1800, 1);
    CHECK(p.further_misses() < 0.1);
}

TEST_CASE("where nothing bypasses the pool any more, nothing is known after a while, and it is learnt at once") {
    pool p(16);
    p.use_runs(0, 50, 4);
    CHECK(p.further_misses() > 0.6);
    p.use_runs(100, 1800, 1, false, false);
    CHECK(p.further_misses() == 0.0);
    p.use_runs(0, 60, 1);
    CHECK(p.further_misses() < 0.1);
    p.use_runs(100, 30, 4);
    CHECK(p.further_misses() > 0.5);
}

TEST_CASE("room for what a layer uses is not made at its own expense") {
    pool p(6);
    p.policy.worthless = { 0, 1, 2, 3, 4, 5 };
    for (uint32_t e = 10; e < 16; e++) {
        p.insert(e);
    }
    for (int i = 0; i < 20; i++) {
        p.use({ 0, 1, 2, 3, 4, 5 });
    }
    CHECK(p.further_misses() > 0.9);
}

TEST_CASE("misses that follow from nothing that bypassed the pool do not count") {
    pool p(16);
    for (int i = 0; i < 200; i++) {
        p.estimate.begin_layer(0, { { p.high(1), true } });
    }
    CHECK(p.further_misses() == 0.0);
    p.use_runs(100, 60, 1);
    CHECK(p.further_misses() == 0.0);
}

TEST_CASE("where a layer uses more than there is room for, it does no harm, and does not count") {
    pool p(6);
    p.use_runs(20, 20, 4);
    CHECK(p.further_misses() == about(0.75));
    for (int i = 0; i < 200; i++) {
        p.use({ 0, 1, 2, 3, 4, 5, 6 });
        CHECK(p.further_misses() == 0.0);
    }
    p.use({ 99 });
    CHECK(p.further_misses() == about(0.75));
    p.use_runs(20, 20, 4);
    CHECK(p.further_misses() == about(0.75));
}

TEST_CASE("what bypassed the pool before a layer that used too much is not decided by what comes after it") {
    pool                  p(60);
    std::vector<uint32_t> many;
    for (uint32_t e = 1000; e < 1061; e++) {
        many.push_back(e);
    }
    p.use_runs(0, 20, 4);
    p.use_runs(100, 40, 1);
    const double before = p.further_misses();
    p.use(many);
    p.use_runs(100, 40, 1);
    CHECK(p.further_misses() == doctest::Approx(before));
}

TEST_CASE("each layer has its share") {
    pool p(6);
    for (uint32_t i = 0; i < 40; i++) {
        p.estimate.begin_layer(0, { { p.high(i % 3), true }, { p.high(10), true }, { p.high(11), true } });
        p.estimate.bypassed(p.high(10));
    }
    CHECK(p.further_misses() > 0.5);
    p.estimate.begin_layer(1, {});
    p.estimate.begin_layer(0, { { p.high(0), true }, { p.high(1), true }, { p.high(2), true } });
    CHECK(p.further_misses() > 0.5);
    p.estimate.begin_layer(0, { { p.high(0), true }, { p.high(1), true }, { p.high(2), true }, { p.high(3), true } });
    CHECK(p.further_misses() == 0.0);
}

// What comes next is prefetched: in time, too late, or without anybody knowing of it.
TEST_CASE("what was prefetched is no difference between bypassing and not") {
    for (const bool is_told : { true, false }) {
        for (const bool is_late : { true, false }) {
            CAPTURE(is_told);
            CAPTURE(is_late);
            pool p(16);
            for (uint32_t e = 0; e + 1 < N_EXPERTS; e += 2) {
                p.use({ e + 1 });
                p.use({ e + 1 });
                if (is_told) {
                    p.estimate.prefetched({ { 0, e }, term_id::high }, 0);
                }
                if (is_late) {
                    p.estimate.begin_layer(0, { { p.high(e), true } });
                } else {
                    p.insert(e);
                    p.use({ e });
                }
            }
            CHECK(p.further_misses() == about(is_told || is_late ? 0.5 : 0.0));
        }
    }
}

TEST_CASE("what was prefetched in vain excuses no later miss") {
    pool p(16);
    p.use({ 1999 });
    for (uint32_t e = 0; e + 1 < N_EXPERTS; e += 2) {
        p.estimate.prefetched({ { 0, e }, term_id::high }, 0);
        p.use({ 1999 }, false); // there from now on
        p.use({ e });
        p.use({ e });
    }
    CHECK(p.further_misses() > 0.9);
}

TEST_CASE("it begins with the pool as it is, but for what is there in part, and leaves it alone") {
    pool p(20);
    for (uint32_t e = 0; e < 20; e++) {
        p.insert(e);
        p.sets.pin({ 0, e }, tier_id::high);
    }
    for (uint32_t e = 10; e < 20; e++) {
        p.sets.set_term_in_part({ 0, e }, term_id::high, true);
    }
    for (int i = 0; i < 41; i++) {
        p.estimate.begin_layer(0, { { p.high(99), i % 2 == 0 } }); // finds room, though all is pinned in the pool
        p.estimate.bypassed(p.high(99));
    }
    const double before = p.further_misses();
    CHECK(before == about(0.5));
    for (uint32_t e = 1; e < 10; e++) {
        p.estimate.begin_layer(0, { { p.high(e), false } });
    }
    CHECK(p.further_misses() == doctest::Approx(before));
    for (uint32_t e = 10; e < 20; e++) {
        p.estimate.begin_layer(0, { { p.high(e), true } });
    }
    CHECK(p.further_misses() == doctest::Approx(before));
    CHECK_FALSE(p.has(99));
    CHECK(p.sets.set(term_id::high).is_pinned({ 0, 1 }));
    CHECK(p.sets.set(term_id::high).is_in_part({ 0, 19 }));
}

TEST_CASE("a residual comes with its low version") {
    pool p(16, true);
    p.use_runs(0, 1000, 2);
    CHECK(p.further_misses() == about(0.5));
}
