// SPDX-License-Identifier: MIT
// A pool's reports to its policy, on traces worked by hand.
#include "fixtures/policy-pool.h"

// Records the calls. It evicts the least recently touched expert and admits none after M.
class recording_policy : public cache_policy {
  public:
    explicit recording_policy(std::string & calls) : calls_(calls) {}

    uint64_t on_insert(expert_id id) override {
        add('+', id);
        return 0;
    }

    bool admits(expert_id newcomer, expert_id victim) override {
        add('?', newcomer);
        add('/', victim);
        return newcomer.expert <= expert('M').expert;
    }

  private:
    void add(char call, expert_id id) { (calls_ += call) += char('A' + id.expert); }

    std::string & calls_;
};

TEST_CASE("a pool reports inserts, and asks before a prefetch evicts") {
    std::string calls;
    pool        p(std::make_unique<recording_policy>(calls), 2);
    p.use_all("AAB");
    CHECK(calls == "+A+B");

    calls.clear();
    CHECK(p.use('Z') == 'A');
    CHECK(calls == "+Z"); // a demand is inserted without asking

    calls.clear();
    CHECK(p.prefetch('C'));
    p.use_all("CC");
    CHECK(calls == "?C/B+C");

    calls.clear();
    CHECK_FALSE(p.prefetch('Y'));
    CHECK(calls == "?Y/Z");
    CHECK(p.set.contains(expert('Z')));

    calls.clear();
    p.set.erase(expert('Z'));
    CHECK(p.prefetch('Y'));
    CHECK(calls == "+Y"); // a free slot is taken without asking
}
