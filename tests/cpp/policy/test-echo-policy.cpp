// SPDX-License-Identifier: MIT
#include "fixtures/one-class.h"
#include "policy/cache-policy.h"

#include <cmath>
#include <doctest/doctest.h>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace hobbit;

static constexpr uint32_t N_LAYERS  = 4;
static constexpr uint32_t N_EXPERTS = 16;

static std::unique_ptr<cache_policy> make(const std::string & name = "echo") {
    policy_options options;
    options.name      = name;
    options.n_layers  = N_LAYERS;
    options.n_experts = N_EXPERTS;
    options.n_used    = 2;
    return registered_policy::make(options);
}

static void use(cache_policy & policy, expert_id id, uint32_t sequence = 0, double weight = 0.5,
                tier_id tier = tier_id::high) {
    policy.on_use({ id, sequence, tier, 1, weight, 2 });
}

// The layers from first on of a token of the kind: in every layer experts 2 kind and 2 kind + 1.
static void run_layers(cache_policy & policy, uint32_t kind, layer_id first, uint32_t past_last,
                       uint32_t sequence = 0) {
    for (layer_id layer = first; layer < past_last; layer++) {
        use(policy, { layer, 2 * kind }, sequence);
        use(policy, { layer, 2 * kind + 1 }, sequence);
    }
}

static void run_token(cache_policy & policy, uint32_t kind, uint32_t sequence = 0) {
    policy.begin_tokens(sequence, 1);
    run_layers(policy, kind, 0, N_LAYERS, sequence);
}

static double value_of(cache_policy & policy, uint32_t kind, layer_id layer, layer_id running) {
    return policy.value({ layer, 2 * kind }, tier_id::high, running);
}

TEST_CASE("uses in earlier runs count until newer ones are known") {
    policy_options options;
    options.name      = "echo";
    options.n_layers  = N_LAYERS;
    options.n_experts = N_EXPERTS;
    options.n_used    = 2;
    options.prior     = options.table<float>();

    options.prior[{ 0, 0 }] = 0.2f; // an expert of kind 0
    options.prior[{ 0, 2 }] = 0.4f; // an expert of kind 1
    auto policy             = registered_policy::make(options);
    policy->begin_sequence(0);
    CHECK(value_of(*policy, 2, 0, 3) == 0.0);
    run_token(*policy, 2);
    CHECK(value_of(*policy, 0, 0, 3) > 0.0);
    CHECK(value_of(*policy, 1, 0, 3) > value_of(*policy, 0, 0, 3));
    CHECK(value_of(*policy, 2, 0, 3) > value_of(*policy, 1, 0, 3));
    for (int i = 0; i < 5; i++) {
        run_token(*policy, 0);
    }
    CHECK(value_of(*policy, 0, 0, 3) > value_of(*policy, 1, 0, 3));
}

TEST_CASE(
    "what is used often is worth more than what is used seldom, what was used lately more than what was long ago") {
    auto policy = make();
    policy->begin_sequence(0);
    for (int i = 0; i < 30; i++) {
        run_token(*policy, i % 10 == 1 ? 1 : 0);
    }
    CHECK(value_of(*policy, 0, 0, 3) > value_of(*policy, 1, 0, 3));
    CHECK(value_of(*policy, 1, 0, 3) > value_of(*policy, 2, 0, 3));
    CHECK(value_of(*policy, 2, 0, 3) == 0.0);

    auto other = make();
    other->begin_sequence(0);
    for (uint32_t kind : { 0, 0, 0, 1, 1, 1, 2 }) {
        run_token(*other, kind);
    }
    CHECK(value_of(*other, 1, 0, 3) > value_of(*other, 0, 0, 3));
}

TEST_CASE("what followed on tokens like this one is worth more than what was used later") {
    auto policy = make();
    policy->begin_sequence(0);
    for (int i = 0; i < 40; i++) {
        run_token(*policy, uint32_t(i) % 8);
    }
    // the last token was of kind 7; now kind 0 comes, then kind 1, whose last use is the longest ago
    policy->begin_tokens(0, 1);
    run_layers(*policy, 0, 0, N_LAYERS);
    CHECK(value_of(*policy, 1, 0, 3) > value_of(*policy, 3, 0, 3));
    CHECK(value_of(*policy, 1, 0, 3) > value_of(*policy, 5, 0, 3));
}

// The additional worth of an expert whose layer has yet to run, above one whose layer has run.
static double worth_now(cache_policy & policy, uint32_t kind) {
    return value_of(policy, kind, 1, 0) - value_of(policy, kind, 1, 3);
}

TEST_CASE("in the layers to come the token that is expected counts most") {
    auto policy = make();
    policy->begin_sequence(0);
    for (uint32_t i = 0; i < 40; i++) {
        run_token(*policy, i % 8);
    }
    for (uint32_t kind = 0; kind < 8; kind++) {
        policy->begin_tokens(0, 1);
        for (uint32_t other = 0; other < 8; other++) {
            CAPTURE(kind);
            CAPTURE(other);
            CHECK((other == kind || worth_now(*policy, kind) > worth_now(*policy, other)));
        }
        run_layers(*policy, kind, 0, N_LAYERS);
    }
}

TEST_CASE("nothing is expected of the first token of a sequence, nor of one that follows several at once") {
    for (const bool several : { false, true }) {
        CAPTURE(several);
        auto policy = make();
        policy->begin_sequence(0);
        for (uint32_t i = 0; i < 44; i++) {
            run_token(*policy, i % 8);
        }
        if (several) {
            policy->begin_tokens(0, 2);
            run_layers(*policy, 3, 0, N_LAYERS);
        } else {
            policy->begin_sequence(0);
        }
        policy->begin_tokens(0, 1);
        CHECK(worth_now(*policy, 7) > worth_now(*policy, 4)); // 4 has followed on 3, but 7 was used later
    }
}

// Hits of a pool that replays tokens of these kinds.
static int count_hits(cache_policy & policy, uint32_t n_slots, const std::vector<uint32_t> & kinds) {
    one_class_set set(N_LAYERS, N_EXPERTS, tier_id::high, n_slots, 0, policy);
    int           hits = 0;
    policy.begin_sequence(0);
    for (uint32_t kind : kinds) {
        policy.begin_tokens(0, 1);
        for (layer_id layer = 0; layer < N_LAYERS; layer++) {
            const expert_id ids[] = { { layer, 2 * kind }, { layer, 2 * kind + 1 } };
            for (const expert_id & id : ids) {
                use(policy, id);
            }
            for (const expert_id & id : ids) {
                expert_id evicted;
                hits += set.contains(id);
                if (!set.contains(id)) {
                    REQUIRE(set.insert(id, id.layer, resident_set::pressure::urgent, &evicted));
                }
                set.pin(id);
                set.touch(id);
            }
            for (const expert_id & id : ids) {
                set.unpin(id);
            }
        }
    }
    return hits;
}

TEST_CASE("a cycle that does not fit hits, where least recently used never does") {
    std::vector<uint32_t> kinds;
    for (uint32_t i = 0; i < 80; i++) {
        kinds.push_back(i % 8);
    }
    // eight kinds of 8 experts each, room for 32: the optimum keeps about half
    CHECK(count_hits(*make("lru"), 32, kinds) == 0);
    CHECK(count_hits(*make("echo"), 32, kinds) > 64); // a tenth of all uses
}

TEST_CASE("an expert that serves in low precision is worth something to the low pool, and less to the high one") {
    auto policy = make();
    policy->begin_sequence(0);
    for (int i = 0; i < 40; i++) {
        policy->begin_tokens(0, 1);
        use(*policy, { 0, 0 }, 0, 0.5, tier_id::high);
        use(*policy, { 0, 1 }, 0, 0.5, tier_id::low);
    }
    CHECK(policy->value({ 0, 0 }, tier_id::high, 3) > policy->value({ 0, 1 }, tier_id::high, 3));
    CHECK(policy->value({ 0, 1 }, tier_id::low, 3) > policy->value({ 0, 0 }, tier_id::low, 3));
    CHECK(policy->value({ 0, 0 }, tier_id::low, 3) == 0.0);
}

TEST_CASE("what one sequence taught serves another") {
    auto policy = make();
    for (uint32_t sequence : { 0, 1 }) {
        policy->begin_sequence(sequence);
        for (int i = 0; i < 40; i++) {
            run_token(*policy, uint32_t(i) % 8, sequence);
        }
    }
    policy->begin_sequence(2);
    run_token(*policy, 3, 2);
    policy->begin_tokens(2, 1);
    CHECK(worth_now(*policy, 4) > worth_now(*policy, 7)); // 7 was used last by the others, but 4 follows on 3
}

// Two sequences side by side, of kinds 0 2 4 6 and 1 3 5 7 in turn.
static void run_two(cache_policy & policy, uint32_t i) {
    policy.begin_tokens(0, 1);
    policy.begin_tokens(1, 1);
    for (layer_id layer = 0; layer < N_LAYERS; layer++) {
        run_layers(policy, 2 * (i % 4), layer, layer + 1, 0);
        run_layers(policy, 2 * (i % 4) + 1, layer, layer + 1, 1);
    }
}

TEST_CASE("of two sequences side by side each is followed") {
    auto policy = make();
    policy->begin_sequence(0);
    policy->begin_sequence(1);
    for (uint32_t i = 0; i < 41; i++) {
        run_two(*policy, i);
    }
    // now kinds 0 and 1 ran; 2 and 3 come next although 6 and 7 were used later
    CHECK(value_of(*policy, 2, 0, 3) > value_of(*policy, 6, 0, 3));
    CHECK(value_of(*policy, 3, 0, 3) > value_of(*policy, 7, 0, 3));
}

TEST_CASE("long runs of batches, sequences and odd weights keep values finite, and are repeatable") {
    auto a = make();
    auto b = make();
    for (cache_policy * policy : { a.get(), b.get() }) {
        std::mt19937 random(5);
        for (int batch = 0; batch < 700; batch++) { // more than are remembered
            const uint32_t n_sequences = 1 + random() % 3;
            const uint32_t n_tokens    = random() % 8 == 0 ? 5 : 1;
            const uint32_t first       = random() % 40;
            if (random() % 20 == 0) {
                policy->begin_sequence(first);
            }
            for (uint32_t s = 0; s < n_sequences; s++) {
                policy->begin_tokens(first + s, n_tokens);
            }
            const uint32_t end = random() % 5 == 0 ? N_LAYERS - 1 : N_LAYERS;
            for (layer_id layer = 0; layer < end; layer++) {
                for (uint32_t s = 0; s < n_sequences; s++) {
                    const uint32_t expert = random() % (N_EXPERTS - 1);
                    const double   weight = random() % 10 == 0 ? 0.0 : 1.0;
                    policy->on_use({ { layer, expert }, first + s, tier_id(random() % 2), n_tokens, weight, 2 });
                    policy->on_use({ { layer, expert + 1 }, first + s, tier_id::high, 1, 1.0 - weight, 2 });
                }
                const double value = policy->value({ layer_id(random() % N_LAYERS), uint32_t(random() % N_EXPERTS) },
                                                   tier_id::high, layer);
                CHECK(std::isfinite(value));
                CHECK(value >= 0.0);
            }
        }
    }
    for (uint32_t expert = 0; expert < N_EXPERTS; expert++) {
        CHECK(a->value({ 1, expert }, tier_id::high, 0) == b->value({ 1, expert }, tier_id::high, 0));
    }
}
