// SPDX-License-Identifier: MIT
// What a pool reports to its policy, and the policies that keep an order of their own, on traces worked by hand.
#include "cache/resident-set.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <map>
#include <memory>
#include <string>
#include <vector>

using namespace hobbit;

using pressure = resident_set::pressure;

static expert_id expert(char letter) {
    return { 0, uint32_t(letter - 'A') };
}

// `prior`: uses per token of A, B and so on; the others have none.
static std::unique_ptr<cache_policy> make(const char * name, const std::vector<float> & prior = {}) {
    policy_options options;
    options.name      = name;
    options.n_layers  = 1;
    options.n_experts = 26;
    options.n_used    = 1;
    if (!prior.empty()) {
        options.prior = options.table<float>();
        std::copy(prior.begin(), prior.end(), options.prior.begin());
    }
    return make_policy(options);
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

    // A batch of tokens that use these experts, which are then inserted in their order.
    std::string prompt(const std::string & letters) {
        std::map<char, uint32_t> counts;
        std::string              evicted;
        for (const char letter : letters) {
            counts[letter]++;
        }
        policy->begin_tokens(0, uint32_t(letters.size()));
        for (const auto & [letter, n] : counts) {
            policy->on_use({ expert(letter), 0, tier_id::high, n, double(n) });
        }
        for (const auto & [letter, n] : counts) {
            expert_id victim = expert('.');
            if (!set.contains(expert(letter))) {
                REQUIRE(set.insert(expert(letter), 0, pressure::urgent, &victim));
            }
            set.touch(expert(letter));
            evicted += char('A' + victim.expert);
        }
        return evicted;
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

//
// S3-FIFO
//

TEST_CASE("s3-fifo: the small queue filters, ghosts come back to the main one, and its hits are further turns") {
    // Four slots: the small queue has one, three ghosts are remembered.
    //   E, A   the oldest of the small queue goes: A, B. A was a ghost and enters the main queue.
    //   C C F  C has two hits and moves to the main queue; D goes.
    //   G H I  E, F and G go, though A, C in the main queue are older.
    //   F H I  ghosts: they enter the main queue for H, I, and C, because A had a hit and gets another turn
    //   B J    B is no ghost any more: F goes for it, and it goes for J from the small queue
    CHECK(pool(make("s3-fifo"), 4).use_all("ABCDEACCFAGHIFHIBJ") == "....AB..D.EFGHICFB");
}

TEST_CASE("s3-fifo: one hit is not enough to leave the small queue, and at most three turns are kept") {
    CHECK(pool(make("s3-fifo"), 2).use_all("AABC") == "...A");
    // Three slots: the small queue has one, two ghosts are remembered. A is the oldest in the main queue. It has ten
    // hits, and the main queue must give up B, D and F before A.
    const std::string hits(10, 'A'), none(10, '.');
    CHECK(pool(make("s3-fifo"), 3).use_all("AAABCD" + hits + "BCDEFEFDGDGHIHI") == ".....B" + none + "CDBCEFDEDGFDHIA");
}

//
// W-TinyLFU
//

TEST_CASE("w-tinylfu: the more frequent one of the window's and the main space's next victim stays") {
    // Four slots: a window of one, a main space of three, two of them protected.
    //   E    D leaves the window, used as often as A, the next victim of the main space: D goes.
    //   F C  A and B are protected. E (2) is used more often than C (1): C goes, but F (1) goes for C (2) afterwards.
    //   G    C (3) against E (2): E goes.
    //   C    is the third one that would be protected: A is on probation again,
    //   H    and goes, as G (3) is used more often.
    pool p(make("w-tinylfu"), 4);
    CHECK(p.use_all("ABCDEABBEFCCGCGGH") == "....D....CF.E...A");
    CHECK_FALSE(p.prefetch('Z')); // H would go for it, and was used once
    CHECK(p.prefetch('A'));       // used twice
    CHECK_FALSE(p.set.contains(expert('H')));
}

TEST_CASE("w-tinylfu: counts end at 15 and are halved after ten uses per slot") {
    const std::string a(36, 'A'), d(8, 'D');
    // after 40 uses A counts 7, so that D with 9 is admitted in its place
    CHECK(pool(make("w-tinylfu"), 4).use_all(a + "BBCC" + "D" + d + "E").back() == 'A');
    // after 39 it counts 15
    CHECK(pool(make("w-tinylfu"), 5).use_all(a + "BBC" + "FD" + d + "E").back() == 'D');
}

//
// ClassLRU
//

TEST_CASE("class-lru: age over 2^class, by a count that halves every 128 tokens") {
    auto       policy = make("class-lru");
    const auto use    = [&](const std::string & letters) {
        for (const char letter : letters) {
            policy->begin_tokens(0, 1);
            policy->on_use({ expert(letter), 0, tier_id::high, 1, 1.0 });
        }
    };
    const auto value = [&](char letter) { return policy->value(expert(letter), term_id::high, 0); };
    use("AAAAABCDE");
    CHECK(value('B') == -3); // class 0
    CHECK(value('C') == -2);
    CHECK(value('E') == 0);
    CHECK(value('A') == -1); // 4.9 uses, class 2, four uses ago
    CHECK(value('Z') == -9); // never used
    policy->begin_tokens(0, 128);
    CHECK(value('A') == -2); // 2.4 uses, class 1
    CHECK(value('B') == -3);
    use(std::string(1000, 'A') + "B");
    CHECK(value('A') == -1.0 / 128); // 184.8 uses, the highest class
    policy->on_use({ expert('C'), 0, tier_id::high, 1000, 1.0 });
    use("B");
    CHECK(value('C') == -1.0 / 128);
}

TEST_CASE("class-lru: a count outlives an eviction") {
    // A has class 2, so that B goes for C. When A is back, after it has gone for E, its class is still 2.
    pool p(make("class-lru"), 2);
    CHECK(p.use_all("AAAAABC") == "......B");
    CHECK(p.use_all("DE") == "CA");
    CHECK(p.use_all("AFG") == "DEF");
}

//
// static
//

TEST_CASE("static: experts that earlier runs used less pass through") {
    pool p(make("static", { 0.5f, 0.4f, 0.1f }), 2);
    CHECK(p.use_all("ABCABDB") == "..B.CBD");
    CHECK_FALSE(p.prefetch('C'));
    CHECK(p.use_all("CCCC") == "B...");
    CHECK(p.prefetch('B'));
}

//
// prompt
//

TEST_CASE("prompt: what generated tokens need passes through in one place") {
    pool p(make("prompt"), 3);
    p.policy->begin_sequence(0);
    CHECK(p.prompt("AAABBC") == "...");
    CHECK(p.use_all("DDDDEAC") == "C...D.E");
    CHECK_FALSE(p.prefetch('F'));
    CHECK(p.use_all("ABDAB") == "..C..");
}

TEST_CASE("prompt: the next prompt counts anew, and its experts replace those with fewer tokens") {
    pool p(make("prompt"), 2);
    CHECK(p.prompt("AAAB") == "..");
    CHECK(p.use('C') == 'B');
    p.policy->begin_sequence(0);
    CHECK(p.prompt("CCDE") == ".AD"); // A has no tokens now
    CHECK(p.use_all("FG") == "EF");
}

TEST_CASE("prompt: an expert keeps its place unless a newcomer has more than 1.05 times its tokens") {
    for (const size_t n : { 105u, 106u }) {
        CAPTURE(n);
        pool p(make("prompt"), 2);
        p.prompt(std::string(100, 'A') + "B");
        CHECK(p.prompt(std::string(n, 'C')) == "B"); // a demand always gets a slot
        CHECK(p.prompt("DD") == (n == 105 ? "C" : "A"));
        CHECK_FALSE(p.prefetch('B'));
        CHECK(p.prefetch(n == 105 ? 'C' : 'A'));
    }
}

TEST_CASE("prompt: before a prompt, experts that earlier runs used more stay") {
    pool p(make("prompt", { 0.5f, 0.4f, 0.1f }), 2);
    CHECK(p.use_all("ABCABD") == "..B.CB");
}
