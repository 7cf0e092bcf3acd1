// SPDX-License-Identifier: MIT
// A pool's reports to its policy, and the policies that keep an order of their own, on traces worked by hand.
#include "fixtures/policy-pool.h"

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

    std::unique_ptr<pool_policy> make_pool(tier_id, uint32_t) override {
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
