// SPDX-License-Identifier: MIT
#include "fixtures/numbers.h"
#include "plan/batch-info.h"
#include "plan/layer-plan.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

namespace {

struct listening_policy : cache_policy {
    std::vector<expert_usage> uses;

    void on_use(const expert_usage & use) override { uses.push_back(use); }
};

// Two tokens of two experts each in layer 3: experts 5 and 2 with weights 3 : 1, then experts 2 and 7 likewise.
const layer_routing ROUTING = { 3, 2, 2, { 5, 2, 2, 7 }, { 0.75f, 0.25f, 0.6f, 0.2f } };

struct step_of_two_tokens {
    std::vector<rule_numbers>       thresholds = { numbers(0.5, 0.5), numbers(0.5, 1.0) }; // skip, low
    bool                            has_low    = true;
    bool                            strict     = false;
    residency                       resident   = [](expert_id, tier_id) { return false; };
    serving                         served     = {};
    std::unique_ptr<precision_rule> rule       = registered_rule::make({ "gate" });
    listening_policy                policy;
    layer_step::novelty             is_new = nullptr;
    step_counts                     counts;

    layer_plan run(const layer_step::filter & is_counted = nullptr) {
        layer_step step(*rule, policy, strict);
        return step.run({ ROUTING, thresholds, resident, has_low, served }, { 8, 9 }, counts, is_counted, is_new);
    }

    // One letter per selection: H, L or - for skipped.
    std::string letters() {
        std::string out;
        for (const precision p : run().precisions) {
            out += p == precision::high ? 'H' : p == precision::low ? 'L' : '-';
        }
        return out;
    }
};

} // namespace

TEST_CASE("an expert serves all tokens in the best precision that any of them needs") {
    step_of_two_tokens s;
    CHECK(s.letters() == "HHHL"); // expert 2 is skipped by the first token and high for the second
    s.strict = true;
    CHECK(s.letters() == "H-HL");
}

TEST_CASE("an expert that its file serves in low precision is low where it would be high, and else what it was") {
    step_of_two_tokens s;
    s.served = [](expert_id id, precision given) {
        return id.layer == 3 && id.expert != 2 ? given : std::min(given, precision::low);
    };
    CHECK(s.letters() == "HLLL");
    s.strict = true;
    CHECK(s.letters() == "H-LL");
    s.thresholds = { {}, {} }; // all high
    CHECK(s.letters() == "HLLH");
    CHECK(s.counts.selections[tier_id::low] == 2);
}

TEST_CASE("a better version that is resident is used") {
    step_of_two_tokens s;
    s.resident = [](expert_id id, tier_id tier) { return id.layer == 3 && id.expert == 7 && tier == tier_id::high; };
    CHECK(s.letters() == "HHHH");
    s.thresholds[1] = numbers(0.5, 0.5);
    s.resident      = [](expert_id id, tier_id tier) { return id.expert == 7 && tier == tier_id::low; };
    CHECK(s.letters() == "HHHL");
}

TEST_CASE("without a low pool low precision counts as high") {
    step_of_two_tokens s;
    s.has_low = false;
    s.strict  = true;
    CHECK(s.letters() == "H-HH");
}

TEST_CASE("the policy hears of each use by each sequence, with the normalised weights") {
    step_of_two_tokens s;
    const layer_plan   plan = s.run();
    REQUIRE(plan.uses.size() == 3); // uses of experts 2, 5 and 7
    CHECK(plan.uses[0].selections == std::vector<int32_t>{ 1, 2 });
    CHECK(plan.uses[2].tier == tier_id::low);
    REQUIRE(s.policy.uses.size() == 4);
    const uint32_t experts[]   = { 2, 2, 5, 7 };
    const uint32_t sequences[] = { 8, 9, 8, 9 };
    const double   weights[]   = { 0.25, 0.75, 0.75, 0.25 };
    for (size_t i = 0; i < 4; i++) {
        CHECK(s.policy.uses[i].id == expert_id{ 3, experts[i] });
        CHECK(s.policy.uses[i].sequence == sequences[i]);
        CHECK(s.policy.uses[i].n_tokens == 1);
        CHECK(s.policy.uses[i].weight == doctest::Approx(weights[i]));
    }
}

TEST_CASE("selections, uses and misses are counted, or those that a filter accepts") {
    step_of_two_tokens s;
    s.resident = [](expert_id id, tier_id tier) { return id.expert == 2 && tier == tier_id::high; };
    s.run();
    CHECK(s.counts.selections == std::array<uint64_t, 2>{ 3, 1 });
    CHECK(s.counts.uses == std::array<uint64_t, 2>{ 2, 1 });
    CHECK(s.counts.misses == std::array<uint64_t, 2>{ 1, 1 });
    CHECK(s.counts.skipped == 0);

    s.strict = true;
    s.run([](int32_t selection) { return selection < 2; }); // selections of the first token
    CHECK(s.counts.selections == std::array<uint64_t, 2>{ 1, 0 });
    CHECK(s.counts.uses == std::array<uint64_t, 2>{ 1, 0 });
    CHECK(s.counts.misses == std::array<uint64_t, 2>{ 1, 0 });
    CHECK(s.counts.skipped == 1);
}

TEST_CASE("what is new in its precision is counted, and the policy hears of what is new in any") {
    step_of_two_tokens s;
    s.is_new = [](int32_t selection, precision served) {
        const precision before[] = { precision::low, precision::high, precision::skip, precision::skip };
        return before[selection] < served;
    };
    s.run();
    CHECK(s.counts.selections == std::array<uint64_t, 2>{ 3, 1 });
    CHECK(s.counts.uses == std::array<uint64_t, 2>{ 2, 1 });
    CHECK(s.counts.misses == std::array<uint64_t, 2>{ 2, 1 });
    REQUIRE(s.policy.uses.size() == 2);
    CHECK(s.policy.uses[0].id == expert_id{ 3, 2 });
    CHECK(s.policy.uses[0].sequence == 9);
    CHECK(s.policy.uses[1].id == expert_id{ 3, 7 });
}

TEST_CASE("strict: the rule decides as if nothing were resident") {
    precision_costs costs;
    REQUIRE(costs.set({ 0, 0, 0, 1.0f }, { 0, 0, 0, 1.0f }, 4, 8).ok());
    step_of_two_tokens s;
    s.rule       = registered_rule::make({ "price", &costs, 0.25 });
    s.thresholds = { numbers(1, 1, 1.0),
                     numbers(1, 1, 1.0) }; // 9/16 + 1/4 for low is less than 1; the others are skipped
    CHECK(s.letters() == "LLL-");
    s.strict = true;
    CHECK(s.letters() == "L-L-");
    s.resident = [](expert_id, tier_id) { return true; };
    CHECK(s.letters() == "L-L-");
    s.strict = false;
    CHECK(s.letters() == "HHHH");
}

TEST_CASE("the highest thresholds of a batch satisfy all of its sequences") {
    sequence_thresholds thresholds(numbers(0.5, 0.6));
    thresholds.set(7, numbers(0.2, 0.9));
    batch_info    batch;
    const int32_t sequences[] = { 7, 3 };
    const int32_t positions[] = { 0, 0 };
    const int8_t  outputs[]   = { 1, 1 };
    CHECK(number(thresholds.highest(batch), "t2") == 0.6);
    batch.begin(2, sequences, positions, outputs);
    CHECK(number(thresholds.highest(batch), "t1") == 0.5);
    CHECK(number(thresholds.highest(batch), "t2") == 0.9);
    CHECK(number(thresholds.of(batch.tokens())[0], "t1") == 0.2);
    thresholds.clear(7, 8);
    CHECK(number(thresholds.highest(batch), "t2") == 0.6);
    thresholds.set(numbers(1.0, 1.0, 0.3));
    thresholds.set(7, numbers(1.0, 1.0, 0.2));
    CHECK(number(thresholds.highest(batch), "price") == 0.2);
    CHECK(number(thresholds.highest({}), "price") == 0.3);
}
