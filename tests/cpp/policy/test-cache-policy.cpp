// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <doctest/doctest.h>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <vector>

using namespace hobbit;

using weights = std::array<double, 4>;

static std::unique_ptr<cache_policy> make(const std::string & name, const weights & w = { 0.25, 0.25, 0.25, 0.25 },
                                          uint64_t seed = 0, uint32_t n_layers = 4) {
    policy_options options;
    options.name      = name;
    options.weights   = w;
    options.n_layers  = n_layers;
    options.n_experts = 8;
    options.n_used    = 2;
    options.seed      = seed;
    auto policy       = registered_policy::make(options);
    REQUIRE(policy);
    return policy;
}

static expert_usage use(layer_id layer, uint32_t expert, tier_id tier = tier_id::high, uint32_t n_tokens = 1,
                        uint32_t sequence = 0) {
    return { { layer, expert }, sequence, tier, n_tokens, 0.5 * n_tokens, 2 };
}

// One token of sequence 0 that uses these.
static void run_token(cache_policy & policy, const std::vector<expert_usage> & uses) {
    policy.begin_tokens(0, 1);
    for (const expert_usage & u : uses) {
        policy.on_use(u);
    }
}

static double value(cache_policy & policy, layer_id layer, uint32_t expert, layer_id running = 0,
                    tier_id tier = tier_id::high) {
    return policy.value({ layer, expert }, tier, running);
}

TEST_CASE("every listed name makes a policy, and no other name does") {
    std::set<std::string> names;
    for (const std::string & name : registered_policy::names()) {
        CAPTURE(name);
        CHECK(make(name) != nullptr);
        names.insert(name);
    }
    CHECK(names.size() == registered_policy::names().size());
    for (const char * name : { "lru", "lfu", "lhu", "fld", "random", "hobbit", "edgemoe", "echo" }) {
        CHECK(names.count(name) == 1);
    }
    policy_options unknown;
    for (const char * name : { "", "LRU", "belady", "lru " }) {
        unknown.name = name;
        CHECK(registered_policy::make(unknown) == nullptr);
    }
}

TEST_CASE("every policy values an expert that was never used no higher than the same one after its use") {
    for (const std::string & name : registered_policy::names()) {
        if (name == "random") {
            continue;
        }
        CAPTURE(name);
        auto policy = make(name);
        policy->begin_sequence(0);
        policy->begin_tokens(0, 1);
        const double before = value(*policy, 2, 3, 1);
        policy->on_use(use(2, 3));
        CHECK(value(*policy, 2, 3, 1) >= before);
        CHECK(value(*policy, 2, 3, 1) >= value(*policy, 2, 4, 1));
    }
}

TEST_CASE("the default weights of Eq. 3 sum to 1") {
    const weights w = policy_options().weights;
    CHECK(std::accumulate(w.begin(), w.end(), 0.0) == doctest::Approx(1.0));
}

TEST_CASE("lru: the order of last uses, across sequences and tiers") {
    auto policy = make("lru");
    policy->begin_sequence(0);
    run_token(*policy, { use(0, 1), use(1, 1, tier_id::low), use(2, 1) });
    CHECK(value(*policy, 0, 1) < value(*policy, 1, 1));
    CHECK(value(*policy, 1, 1) < value(*policy, 2, 1));
    policy->begin_sequence(1);
    policy->on_use(use(0, 1, tier_id::high, 1, 1));
    CHECK(value(*policy, 0, 1) > value(*policy, 2, 1));
    CHECK(value(*policy, 0, 1) ==
          value(*policy, 0, 1, 3, tier_id::low)); // neither the running layer nor the tier matters
}

TEST_CASE("lfu: tokens that used the expert, whatever their precision") {
    auto policy = make("lfu");
    policy->begin_sequence(0);
    run_token(*policy, { use(0, 1), use(0, 2, tier_id::low, 5) });
    run_token(*policy, { use(0, 1) });
    CHECK(value(*policy, 0, 1) == 2);
    CHECK(value(*policy, 0, 2) == 5);
    CHECK(value(*policy, 0, 3) == 0);
    policy->begin_sequence(0);
    CHECK(value(*policy, 0, 2) == 5); // a baseline never forgets
}

TEST_CASE("lfu and edgemoe begin with the uses of earlier runs, Eq. 3 does not") {
    policy_options options;
    options.weights   = { 0.5, 0.25, 0.25, 0 };
    options.n_layers  = 4;
    options.n_experts = 8;
    options.n_used    = 2;
    options.prior     = options.table<float>();

    options.prior[{ 0, 1 }] = 0.25f;
    options.prior[{ 0, 2 }] = 0.5f;
    options.prior[{ 2, 1 }] = 0.5f;

    options.name = "lfu";
    auto lfu     = registered_policy::make(options);
    lfu->begin_sequence(0);
    CHECK(value(*lfu, 0, 1) == 16); // a quarter of 64 tokens
    run_token(*lfu, { use(0, 1) });
    CHECK(value(*lfu, 0, 1) == 17);
    options.name = "edgemoe";
    auto edgemoe = registered_policy::make(options);
    CHECK(value(*edgemoe, 2, 1) == 16); // 32, two layers ahead
    options.name = "hobbit";
    auto hobbit  = registered_policy::make(options);
    hobbit->begin_sequence(0);
    CHECK(value(*hobbit, 0, 2) == 0);
    hobbit->begin_tokens(0, 64);
    hobbit->on_use(use(0, 1, tier_id::high, 64));
    CHECK(value(*hobbit, 0, 1) == 1);
}

TEST_CASE("lhu: tokens that the expert served in high precision") {
    auto policy = make("lhu");
    policy->begin_sequence(0);
    run_token(*policy, { use(0, 1, tier_id::high, 2), use(0, 2, tier_id::low, 5) });
    CHECK(value(*policy, 0, 1, 0, tier_id::low) == 2);
    CHECK(value(*policy, 0, 2, 0, tier_id::low) == 0);
}

TEST_CASE("fld: the nearer an expert's layer is to its turn the more it is worth") {
    auto policy = make("fld");
    // four layers, layer 1 runs: itself 1, layer 2 one step ahead, layer 3 two, layer 0 three
    CHECK(value(*policy, 1, 0, 1) == 1.0);
    CHECK(value(*policy, 2, 0, 1) == 0.75);
    CHECK(value(*policy, 3, 0, 1) == 0.5);
    CHECK(value(*policy, 0, 0, 1) == 0.25);
}

TEST_CASE("random: the seed decides, and nothing else") {
    auto        a = make("random", {}, 1);
    auto        b = make("random", {}, 1);
    auto        c = make("random", {}, 2);
    std::string same;
    int         n_other = 0;
    for (int i = 0; i < 20; i++) {
        const double drawn = value(*a, 0, 0);
        CHECK(drawn == value(*b, 1, 1));
        n_other += drawn != value(*c, 0, 0);
    }
    CHECK(n_other == 20);
}

TEST_CASE("hobbit: the LRU tier is the last used token over the tokens so far") {
    auto policy = make("hobbit", { 1, 0, 0, 0 });
    policy->begin_sequence(0);
    run_token(*policy, { use(0, 1), use(0, 2) }); // token 1
    run_token(*policy, { use(0, 2) });            // token 2
    run_token(*policy, {});
    run_token(*policy, {}); // T = 4
    CHECK(value(*policy, 0, 1) == 0.25);
    CHECK(value(*policy, 0, 2) == 0.5);
    CHECK(value(*policy, 0, 3) == 0.0);
}

TEST_CASE("hobbit: a batch counts all its tokens, and uses in it count as of its last token") {
    auto policy = make("hobbit", { 1, 0, 0, 0 });
    policy->begin_sequence(0);
    policy->begin_tokens(0, 6);
    policy->on_use(use(0, 1, tier_id::high, 3));
    CHECK(value(*policy, 0, 1) == 1.0);
    policy->begin_tokens(0, 2);
    CHECK(value(*policy, 0, 1) == 0.75);

    auto lfu = make("hobbit", { 0, 1, 0, 0 });
    lfu->begin_sequence(0);
    lfu->begin_tokens(0, 6);
    lfu->on_use(use(0, 1, tier_id::high, 3));
    CHECK(value(*lfu, 0, 1) == 0.5);
}

TEST_CASE("hobbit: the LFU tier counts all uses, the LHU tier only those in high precision") {
    auto lfu = make("hobbit", { 0, 1, 0, 0 });
    auto lhu = make("hobbit", { 0, 0, 1, 0 });
    for (cache_policy * policy : { lfu.get(), lhu.get() }) {
        policy->begin_sequence(0);
        run_token(*policy, { use(0, 1, tier_id::high), use(0, 2, tier_id::low) });
        run_token(*policy, { use(0, 1, tier_id::low), use(0, 2, tier_id::low) });
        run_token(*policy, { use(0, 2, tier_id::low) });
        run_token(*policy, { use(0, 1, tier_id::high) });
    }
    CHECK(value(*lfu, 0, 1) == 0.75); // 3 of 4 tokens
    CHECK(value(*lfu, 0, 2) == 0.75);
    CHECK(value(*lhu, 0, 1) == 0.5);
    CHECK(value(*lhu, 0, 2) == 0.0);
}

TEST_CASE("hobbit: the FLD tier and the sum of all four, the same for both pools") {
    auto fld = make("hobbit", { 0, 0, 0, 1 });
    fld->begin_sequence(0);
    run_token(*fld, { use(2, 1) });
    CHECK(value(*fld, 1, 1, 1) == 1.0);
    CHECK(value(*fld, 2, 1, 1) == 0.75);
    CHECK(value(*fld, 0, 1, 1) == 0.25);

    auto policy = make("hobbit", { 0.4, 0.3, 0.2, 0.1 });
    policy->begin_sequence(0);
    run_token(*policy, { use(2, 1, tier_id::high) });
    run_token(*policy, { use(2, 1, tier_id::low) });
    run_token(*policy, {});
    run_token(*policy, {});
    // R/T 2/4, F/T 2/4, H/T 1/4, FLD 0.75
    const double worked = 0.4 * 0.5 + 0.3 * 0.5 + 0.2 * 0.25 + 0.1 * 0.75;
    CHECK(value(*policy, 2, 1, 1, tier_id::high) == doctest::Approx(worked));
    CHECK(value(*policy, 2, 1, 1, tier_id::low) == doctest::Approx(worked));
}

TEST_CASE("hobbit: a sequence that begins anew has no history") {
    auto policy = make("hobbit", { 0.5, 0.5, 0, 0 });
    policy->begin_sequence(0);
    run_token(*policy, { use(0, 1) });
    CHECK(value(*policy, 0, 1) == 1.0);
    policy->begin_sequence(0);
    CHECK(value(*policy, 0, 1) == 0.0);
    run_token(*policy, { use(0, 2) });
    CHECK(value(*policy, 0, 1) == 0.0);
    CHECK(value(*policy, 0, 2) == 1.0);
}

TEST_CASE("hobbit: of two sequences the one to which the expert is worth most decides") {
    auto policy = make("hobbit", { 0.5, 0.5, 0, 0 });
    policy->begin_sequence(0);
    policy->begin_sequence(1);
    for (int token = 0; token < 4; token++) { // 0.1 is used by each token of sequence 1, by the first of sequence 0
        policy->begin_tokens(0, 1);
        policy->begin_tokens(1, 1);
        policy->on_use(use(0, 1, tier_id::high, 1, 1));
        policy->on_use(use(0, token == 0 ? 1 : 2, tier_id::high, 1, 0));
    }
    CHECK(value(*policy, 0, 1) == 1.0);
    CHECK(value(*policy, 0, 2) == doctest::Approx(0.5 + 0.5 * 0.75));
    policy->begin_sequence(1); // sequence 0 keeps its records
    CHECK(value(*policy, 0, 1) == doctest::Approx(0.5 * 0.25 + 0.5 * 0.25));
    CHECK(value(*policy, 0, 2) == doctest::Approx(0.5 + 0.5 * 0.75));
}

TEST_CASE("a sequence that is not run for long is forgotten") {
    usage_records records(1, 4);
    records.begin_sequence(7);
    records.begin_tokens(7, 1);
    records.on_use(use(0, 1, tier_id::high, 1, 7));
    const auto uses = [](const usage_record & r, uint32_t) { return double(r.n_uses); };
    for (uint64_t i = 0; i < usage_records::n_idle_max; i++) {
        records.begin_tokens(8, 1);
    }
    CHECK(records.n_sequences() == 2);
    CHECK(records.largest({ 0, 1 }, uses) == 1);
    records.begin_tokens(8, 1);
    CHECK(records.n_sequences() == 1);
    CHECK(records.largest({ 0, 1 }, uses) == 0);
    records.begin_tokens(7, 1); // goes on without its past
    CHECK(records.n_sequences() == 2);
    CHECK(records.largest({ 0, 1 }, uses) == 0);
}

TEST_CASE("edgemoe: uses over the distance ahead") {
    auto policy = make("edgemoe");
    policy->begin_sequence(0);
    for (layer_id layer = 0; layer < 4; layer++) {
        run_token(*policy, { use(layer, 1), use(layer, 1), use(layer, 2) });
    }
    // layer 1 runs: layer 2 is 1 ahead, 3 is 2, 0 is 3, layer 1 comes again after 4
    CHECK(value(*policy, 2, 1, 1) == 2.0);
    CHECK(value(*policy, 3, 1, 1) == 1.0);
    CHECK(value(*policy, 0, 1, 1) == doctest::Approx(2.0 / 3));
    CHECK(value(*policy, 1, 1, 1) == 0.5);
    CHECK(value(*policy, 2, 2, 1) == 1.0);
}

TEST_CASE("distances go around whatever the number of layers") {
    auto fld     = make("fld", {}, 0, 3);
    auto edgemoe = make("edgemoe", {}, 0, 3);
    for (layer_id layer = 0; layer < 3; layer++) {
        run_token(*edgemoe, { use(layer, 1) });
    }
    for (layer_id running = 0; running < 3; running++) {
        for (uint32_t ahead = 1; ahead <= 3; ahead++) {
            CAPTURE(running);
            CAPTURE(ahead);
            const layer_id layer((running + ahead) % 3);
            CHECK(value(*edgemoe, layer, 1, running) == 1.0 / ahead);
            CHECK(value(*fld, layer, 1, running) == doctest::Approx(1.0 - (ahead % 3) / 3.0));
        }
    }
}
