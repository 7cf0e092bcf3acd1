// SPDX-License-Identifier: MIT
// The policies static and prompt, on traces worked by hand.
#include "fixtures/policy-pool.h"
#include "fixtures/routes.h"

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

TEST_CASE("static: an expert passes through although its layer holds no more than its quota") {
    policy_options o = { "static" };
    o.n_layers       = 2;
    o.n_experts      = 2;
    o.prior          = o.table<float>();
    for (const expert_id id : { expert_id{ 1, 0 }, expert_id{ 1, 1 } }) {
        o.prior[id] = 0.5f;
    }
    const auto    policy = registered_policy::make(o);
    one_class_set set(2, 2, tier_id::high, 2, 1, *policy);
    for (const expert_id id : { expert_id{ 1, 0 }, expert_id{ 0, 0 }, expert_id{ 1, 1 } }) {
        expert_id evicted{};
        REQUIRE(set.insert(id, id.layer, pressure::urgent, &evicted));
    }
    CHECK((set.contains({ 1, 0 }) && set.contains({ 1, 1 })));
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

TEST_CASE("prompt: several pools of one policy have guests of their own") {
    const auto    policy = make("prompt");
    one_class_set high(1, 26, tier_id::high, 2, 0, *policy);
    one_class_set low(1, 26, tier_id::low, 2, 0, *policy);
    const auto    insert = [](resident_set & set, char letter) {
        expert_id evicted = expert('.');
        REQUIRE(set.insert(expert(letter), 0, pressure::urgent, &evicted));
        return char('A' + evicted.expert);
    };
    policy->begin_tokens(0, 2);
    for (const char letter : { 'A', 'B' }) {
        policy->on_use({ expert(letter), 0, tier_id::high, 1, 1.0, 1 });
        CHECK(insert(high, letter) == '.');
        CHECK(insert(low, letter) == '.');
    }
    policy->begin_tokens(0, 1);
    CHECK(insert(high, 'C') == 'B');
    CHECK(insert(low, 'D') == 'B');
    CHECK(insert(high, 'E') == 'C');
    CHECK(insert(low, 'F') == 'D');
}

TEST_CASE("prompt: before a prompt, experts that earlier runs used more stay") {
    pool p(make("prompt", { 0.5f, 0.4f, 0.1f }), 2);
    CHECK(p.use_all("ABCABD") == "..B.CB");
}

//
// simulated
//

TEST_CASE("static needs a prior, which also fills the pools") {
    const float       uses[] = { 0.5f, 0.4f, 0.1f };
    hobbit_simulation o      = options("static", 1, 3, 1, 2);
    const route_list  routes = letters("ABCAB");
    CHECK(contains(refusal(routes, o), "give a prior"));
    o.prior = uses;
    CHECK(run(routes, o).misses_high == 2); // C, and B, whose place C took
}
