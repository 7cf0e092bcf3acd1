// SPDX-License-Identifier: MIT
// What a pool reports to its policy, and the policies that keep an order of their own, on traces worked by hand.
#include "cache/resident-set.h"
#include "policy/cache-policy.h"

#include <doctest/doctest.h>
#include <memory>
#include <string>

using namespace hobbit;

using pressure = resident_set::pressure;

static expert_id expert(char letter) {
    return { 0, uint32_t(letter - 'A') };
}

// A pool of one layer with the experts A to Z.
struct pool {
    std::unique_ptr<cache_policy> policy;
    resident_set                  set;

    pool(std::unique_ptr<cache_policy> p, uint32_t n_slots) :
        policy(std::move(p)), set(1, 26, term_id::high, n_slots, 0, *policy) {}

    // The token that comes next uses the expert. The letter of the expert that is evicted for it, or a dot.
    char use(char letter) {
        expert_id evicted = expert('.');
        policy->begin_tokens(0, 1);
        policy->on_use({ expert(letter), 0, tier_id::high, 1, 1.0 });
        if (!set.contains(expert(letter))) {
            REQUIRE(set.insert(expert(letter), 0, pressure::urgent, &evicted));
        }
        set.touch(expert(letter));
        return char('A' + evicted.expert);
    }

    std::string use_all(const std::string & letters) {
        std::string evicted;
        for (const char letter : letters) {
            evicted += use(letter);
        }
        return evicted;
    }

    bool prefetch(char letter) {
        expert_id evicted;
        return set.insert(expert(letter), 0, pressure::polite, &evicted);
    }
};

//
// reports
//

// Records the calls. It evicts the least recently touched expert and admits none after M.
class recording_pool : public pool_policy {
  public:
    explicit recording_pool(std::string & calls) : calls_(calls) {}

    std::unique_ptr<pool_policy> clone() const override { return std::make_unique<recording_pool>(*this); }

    void on_insert(expert_id id) override { add('+', id); }
    void on_hit(expert_id id) override { add('=', id); }
    void on_evict(expert_id id) override { add('-', id); }

    bool admits(expert_id newcomer, expert_id victim) override {
        add('?', newcomer);
        add('/', victim);
        return newcomer.expert <= expert('M').expert;
    }

  private:
    void add(char call, expert_id id) { (calls_ += call) += char('A' + id.expert); }

    std::string & calls_;
};

struct recording_policy : cache_policy {
    explicit recording_policy(std::string & to) : calls(to) {}

    std::unique_ptr<pool_policy> make_pool(term_id, uint32_t) override {
        return std::make_unique<recording_pool>(calls);
    }

    std::string & calls;
};

TEST_CASE("a pool reports inserts, hits and evictions, and asks before a prefetch evicts") {
    std::string calls;
    pool        p(std::make_unique<recording_policy>(calls), 2);
    p.use_all("AAB");
    CHECK(calls == "+A=A+B"); // the use that inserts an expert is not a hit

    calls.clear();
    CHECK(p.use('Z') == 'A');
    CHECK(calls == "-A+Z"); // a demand is inserted without asking

    calls.clear();
    CHECK(p.prefetch('C'));
    p.use_all("CC");
    CHECK(calls == "?C/B-B+C=C"); // nor is the first use of a prefetched expert a hit

    calls.clear();
    CHECK_FALSE(p.prefetch('Y'));
    CHECK(calls == "?Y/Z");
    CHECK(p.set.contains(expert('Z')));

    calls.clear();
    p.set.erase(expert('Z'));
    CHECK(p.prefetch('Y'));
    CHECK(calls == "-Z+Y"); // a free slot is taken without asking
}
