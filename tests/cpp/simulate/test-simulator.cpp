// SPDX-License-Identifier: MIT
#include "fixtures/routes.h"
#include "policy/cache-policy.h"

#include <algorithm>
#include <cmath>
#include <doctest/doctest.h>
#include <list>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace hobbit;

static uint64_t hits(const std::string & text, const char * policy, uint32_t n_slots) {
    const hobbit_simulation_result r = run(letters(text), options(policy, 1, 26, 1, n_slots));
    CHECK(r.hits_low + r.misses_low + r.skipped == 0);
    CHECK(r.penalty == double(r.misses_high));
    return r.hits_high;
}

//
// one pool
//

static std::vector<std::string> policies_without_prior() {
    std::vector<std::string> names = registered_policy::names();
    const auto needs = [](const std::string & name) { return registered_policy::traits(name).needs_prior; };
    names.erase(std::remove_if(names.begin(), names.end(), needs), names.end());
    return names;
}

TEST_CASE("two slots, by hand") {
    // lru keeps AB AB AC BC BA; belady leaves C out; lfu: A has 2 uses when C comes, so B goes, then C
    CHECK(hits("ABACBA", "lru", 2) == 1);
    CHECK(hits("ABACBA", "belady", 2) == 3);
    CHECK(hits("ABACBA", "lfu", 2) == 2);
}

TEST_CASE("uses are counted by the policy while an expert is away, and ties go to the least recent") {
    // C takes the place of B, which comes back with two uses: as many as A, which is older and makes room for D
    CHECK(hits("AABCBDB", "lfu", 2) == 2);
    // all have one use: D takes the place of A, then A that of B
    CHECK(hits("ABCDAC", "lfu", 3) == 1);
    CHECK(hits("ABCDAB", "lfu", 3) == 0);
    // A and B have two uses each, B's were earlier
    CHECK(hits("ABBACA", "lfu", 2) == 3);
}

TEST_CASE("without slots everything is a miss, with a slot for each expert only the first use is") {
    for (const std::string & name : policies_without_prior()) {
        CAPTURE(name);
        CHECK(hits("ABABAB", name.c_str(), 0) == 0);
        CHECK(hits("ABABAB", name.c_str(), 26) == 4);
        CHECK(hits("ABABAB", name.c_str(), UINT32_MAX) == 4);
        CHECK(hits("AAABBB", name.c_str(), 1) == 4);
    }
    CHECK(hits("ABABAB", "belady", 0) == 0);
    CHECK(hits("ABABAB", "belady", 26) == 4);
}

TEST_CASE("what earlier runs used fills the pools, the most used experts first") {
    std::vector<float> prior(26, 0.0f); // uses of A, B and C
    prior[0]            = 0.2f;
    prior[1]            = 0.5f;
    prior[2]            = 0.3f;
    hobbit_simulation o = options("lru", 1, 26, 1, 2);
    o.prior             = prior.data();
    CHECK(run(letters("BC"), o).hits_high == 2);
    CHECK(run(letters("A"), o).hits_high == 0);
    CHECK(run(letters("ABC"), o).hits_high == 1); // A takes the place of C
    o.belady = 1;
    CHECK(contains(refusal(letters("A"), o), "belady"));
}

TEST_CASE("uncounted tokens warm the cache") {
    const hobbit_simulation_result r = run(letters("abABC"), options("lru", 1, 26, 1, 2));
    CHECK(r.hits_high == 2);
    CHECK(r.misses_high == 1);
    CHECK(r.n_tokens == 3);
}

TEST_CASE("the bound does not keep what is next used by an uncounted token") {
    // keeping A through "a" would cost B, which is counted
    const route_list routes = letters("AB") + letters("a", 0, 2) + letters("B", 0, 3) + letters("A", 0, 4);
    CHECK(run(routes, options("belady", 1, 26, 1, 1)).hits_high == 1);
}

TEST_CASE("when the layer in hand fills the pool, what does not fit is served without being kept") {
    route_list routes;
    for (int32_t token = 0; token < 3; token++) {
        for (int32_t expert = 0; expert < 3; expert++) {
            routes.push_back({ 0, token, 0, expert, 0.3f, 1 });
        }
    }
    for (const std::string & name : policies_without_prior()) {
        CAPTURE(name);
        const hobbit_simulation_result r = run(routes, options(name, 1, 4, 3, 2));
        CHECK(r.hits_high == 4); // two of three, from the second token on
        CHECK(r.misses_high == 5);
        CHECK(run(routes, options(name, 1, 4, 3, 3)).hits_high == 6);
    }
}

TEST_CASE("an expert of the layer in hand is not evicted for another one of it") {
    // pairs of experts; of two that are missing the first by number is loaded first
    const auto hits_of = [](const std::vector<std::pair<int32_t, int32_t>> & tokens, const char * policy) {
        route_list routes;
        for (size_t t = 0; t < tokens.size(); t++) {
            routes.push_back({ 0, int32_t(t), 0, tokens[t].first, 0.5f, 1 });
            routes.push_back({ 0, int32_t(t), 0, tokens[t].second, 0.5f, 1 });
        }
        return run(routes, options(policy, 1, 4, 2, 1)).hits_high;
    };
    for (const std::string & name : policies_without_prior()) {
        CAPTURE(name);
        CHECK(hits_of({ { 2, 3 }, { 2, 3 }, { 1, 2 } }, name.c_str()) == 2); // the one loaded first stays
        CHECK(hits_of({ { 2, 3 }, { 0, 2 }, { 2, 3 } }, name.c_str()) == 2); // the one that was there stays
    }
}

// Three layers in turn, the same experts for every token.
static route_list cycle(int32_t n_tokens) {
    route_list routes;
    for (int32_t token = 0; token < n_tokens; token++) {
        for (int32_t layer = 0; layer < 3; layer++) {
            routes.push_back({ 0, token, layer, 0, 0.5f, 1 });
            routes.push_back({ 0, token, layer, 1, 0.5f, 1 });
        }
    }
    return routes;
}

TEST_CASE("a pool smaller than one token's cycle never hits with lru, but with floors") {
    hobbit_simulation o = options("lru", 3, 4, 2, 4);
    CHECK(run(cycle(10), o).hits_high == 0);
    o.floors = 1; // (4 - 2) / (3 - 1) = 1 of 2 in each layer
    CHECK(run(cycle(10), o).hits_high > 0);
    o.slots_high = 6;
    CHECK(run(cycle(10), o).hits_high == 54);
}

//
// two pools
//

TEST_CASE("a token loads high, low and nothing") {
    const hobbit_simulation_result r = run(ranked({ { 0, 1, 2 } }), mixed(4, 4));
    CHECK(r.misses_high == 1);
    CHECK(r.misses_low == 1);
    CHECK(r.skipped == 1);
    CHECK(r.hits_high + r.hits_low == 0);
    CHECK(r.penalty == 1.0 + 4.0 / 16.0);
    CHECK(r.n_tokens == 1);
}

TEST_CASE("a resident version at least as good is used, whatever the expert is worth") {
    // second token: 1 is worth high and only low is there; 0 is worth low and high is there; 2 is skipped
    hobbit_simulation_result r = run(ranked({ { 0, 1, 2 }, { 1, 0, 2 } }), mixed(4, 4));
    CHECK(r.misses_high == 2);
    CHECK(r.hits_high == 1);
    CHECK(r.misses_low == 1);
    CHECK(r.skipped == 2);
    // second token: 3 is loaded, 4 in low; 1, worth nothing, is there in low
    r = run(ranked({ { 0, 1, 2 }, { 3, 4, 1 } }), mixed(4, 4));
    CHECK(r.hits_low == 1);
    CHECK(r.misses_high == 2);
    CHECK(r.misses_low == 2);
    CHECK(r.skipped == 1);
}

TEST_CASE("pools without slots keep nothing") {
    const hobbit_simulation_result r = run(ranked({ { 0, 1, 2 }, { 0, 1, 2 }, { 0, 1, 2 } }), mixed(0, 0));
    CHECK(r.misses_high == 3);
    CHECK(r.misses_low == 3);
    CHECK(r.skipped == 3);
    CHECK(r.hits_high + r.hits_low == 0);
    CHECK(r.penalty == 3.75);
}

TEST_CASE("each pool evicts for itself") {
    // the low pool has one slot: 1 goes for 4, while 0 and 3 stay in high precision
    const hobbit_simulation_result r = run(ranked({ { 0, 1, 2 }, { 3, 4, 2 }, { 0, 1, 2 } }), mixed(2, 1));
    CHECK(r.hits_high == 1);
    CHECK(r.misses_high == 2);
    CHECK(r.hits_low == 0);
    CHECK(r.misses_low == 3);
}

//
// sequences and batches
//

// The hits of letters in the first of two layers, with two slots for them, under LFU within the sequence. The second
// layer always uses the same expert.
static uint64_t hits_by_frequency(const route_list & routes) {
    route_list with_second_layer;
    for (hobbit_route r : routes) {
        with_second_layer.push_back(r);
        r.layer  = 1;
        r.expert = 0;
        with_second_layer.push_back(r);
    }
    hobbit_simulation o = options("hobbit", 2, 26, 1, 3);
    set(o, "hobbit.w_lfu", 1.0); // the others are then 0
    return run(with_second_layer, o).hits_high - (routes.size() - 1);
}

TEST_CASE("a new sequence does not inherit the records of one that has ended") {
    // forgotten, A and B are equal and the older one, A, makes room for C
    CHECK(hits_by_frequency(letters("AAAB") + letters("CB", 1)) == 3);
    CHECK(hits_by_frequency(letters("AAAB") + letters("CA", 1)) == 2);
    // within one sequence B has fewer uses
    CHECK(hits_by_frequency(letters("AAABCA")) == 3);
}

TEST_CASE("a sequence that goes on keeps its records beside another one") {
    CHECK(hits_by_frequency(letters("AAAB") + letters("C", 1) + letters("A", 0, 4)) == 3);
}

TEST_CASE("a batch that shares an expert loads it once") {
    // two sequences decode side by side through two layers
    const route_list routes = {
        { 0, 0, 0, 3, 1.0f, 1 }, { 1, 0, 0, 3, 1.0f, 1 }, { 0, 0, 1, 2, 1.0f, 1 }, { 1, 0, 1, 1, 1.0f, 1 },
        { 0, 1, 0, 3, 1.0f, 1 }, { 1, 1, 0, 2, 1.0f, 1 }, { 0, 1, 1, 2, 1.0f, 1 }, { 1, 1, 1, 2, 1.0f, 1 },
    };
    for (const char * policy : { "lru", "belady" }) {
        const hobbit_simulation_result r = run(routes, options(policy, 2, 4, 1, 8));
        CHECK(r.misses_high == 4);
        CHECK(r.hits_high == 4);
        CHECK(r.n_tokens == 4);
    }
}

TEST_CASE("in a batch the token that asks for most decides") {
    route_list routes = ranked({ { 0, 1, 2 }, { 2, 1, 0 } });
    for (hobbit_route & r : routes) {
        r.sequence = r.token; // two sequences, one batch
    }
    const hobbit_simulation_result r = run(routes, mixed(4, 4));
    CHECK(r.misses_high == 2);
    CHECK(r.hits_high == 2);
    CHECK(r.misses_low == 1);
    CHECK(r.hits_low == 1);
    CHECK(r.skipped == 0);
}

//
// properties
//

struct random_case {
    route_list        routes;
    hobbit_simulation simulation;
};

static random_case make_case(std::mt19937 & rng, const char * policy) {
    const auto     below = [&](uint32_t n) { return uint32_t(rng() % n); };
    random_case    c;
    const uint32_t n_layers  = 1 + below(3);
    const uint32_t n_experts = 2 + below(5);
    const uint32_t n_used    = 1 + below(n_experts - 1);
    c.simulation             = options(policy, n_layers, n_experts, n_used, below(n_layers * n_experts + 2));
    c.simulation.floors      = below(2);

    std::vector<uint32_t> popularity(n_experts);
    std::iota(popularity.begin(), popularity.end(), 0);
    int32_t next[2] = { 0, 0 };
    for (uint32_t batch = 0; batch < 12; batch++) {
        const uint32_t n_prompt =
            below(4) == 0 ? 2 + below(4) : 0; // prompt tokens of sequence 0; with 0 each sequence decodes
        for (layer_id layer = 0; layer < n_layers; layer++) {
            for (uint32_t t = 0; t < std::max(n_prompt, 2u); t++) {
                const int32_t sequence = n_prompt ? 0 : int32_t(t);
                const int32_t token    = next[sequence] + int32_t(n_prompt ? t : 0);
                std::shuffle(popularity.begin(), popularity.begin() + below(n_experts + 1), rng);
                for (uint32_t i = 0; i < n_used; i++) {
                    c.routes.push_back({ sequence, token, int32_t(layer), int32_t(popularity[i]),
                                         float(n_used - i) / float(n_used * (n_used + 1) / 2), n_prompt == 0 });
                }
            }
        }
        next[0] += int32_t(std::max(n_prompt, 1u));
        next[1] += n_prompt == 0;
    }
    return c;
}

TEST_CASE("nothing beats belady, and everything is counted once") {
    std::mt19937 rng(1);
    for (int i = 0; i < 300; i++) {
        CAPTURE(i);
        random_case                    c         = make_case(rng, BELADY);
        const hobbit_simulation_result bound     = run(c.routes, c.simulation);
        const uint64_t                 n_counted = uint64_t(
            std::count_if(c.routes.begin(), c.routes.end(), [](const hobbit_route & r) { return r.counted != 0; }));
        CHECK(bound.hits_high + bound.misses_high == n_counted);
        for (const std::string & name : policies_without_prior()) {
            CAPTURE(name);
            set_policy(c.simulation, name);
            const hobbit_simulation_result r = run(c.routes, c.simulation);
            CHECK(r.hits_high + r.misses_high == n_counted);
            CHECK(r.hits_high <= bound.hits_high);
        }
    }
}

// The most counted hits there can be, by trying every set of experts that may be kept after each use.
static uint64_t most_hits(const std::string & text, uint32_t n_experts, uint32_t n_slots) {
    const uint32_t   n_sets = 1u << n_experts;
    std::vector<int> best(n_sets, -1);
    best[0] = 0;
    for (const char c : text) {
        const bool       counted = c < 'a';
        const uint32_t   bit     = 1u << (counted ? c - 'A' : c - 'a');
        std::vector<int> next(n_sets, -1);
        for (uint32_t set = 0; set < n_sets; set++) {
            if (best[set] < 0) {
                continue;
            }
            const int value = best[set] + (counted && (set & bit));
            for (uint32_t kept = 0; kept < n_sets; kept++) {
                if ((kept & ~(set | bit)) == 0 && uint32_t(__builtin_popcount(kept)) <= n_slots) {
                    next[kept] = std::max(next[kept], value);
                }
            }
        }
        best = next;
    }
    return uint64_t(*std::max_element(best.begin(), best.end()));
}

TEST_CASE("belady reaches the most hits that exhaustive search finds") {
    std::mt19937 rng(2);
    for (int i = 0; i < 150; i++) {
        std::string text;
        route_list  routes;
        for (int32_t token = 0; token < 14; token++) {
            // two layers, of which the second one always has the same expert: each token is a batch
            const bool    counted  = rng() % 3 != 0;
            const int32_t expert   = int32_t(rng() % 4);
            text                  += char((counted ? 'A' : 'a') + expert);
            text                  += counted ? 'E' : 'e';
            routes.push_back({ 0, token, 0, expert, 1.0f, counted });
            routes.push_back({ 0, token, 1, 0, 1.0f, counted });
        }
        const uint32_t n_slots = uint32_t(rng() % 4);
        CAPTURE(text);
        CAPTURE(n_slots);
        CHECK(run(routes, options(BELADY, 2, 4, 1, n_slots)).hits_high == most_hits(text, 5, n_slots));
    }
}

TEST_CASE("lru agrees with a list") {
    std::mt19937 rng(3);
    for (int i = 0; i < 100; i++) {
        std::string       text;
        const size_t      n_slots = 1 + rng() % 6;
        std::list<char>   list; // the most recent first
        uint64_t          expected = 0;
        std::vector<char> alphabet;
        for (int token = 0; token < 60; token++) {
            const char c     = char('A' + std::min<int>(int(rng() % 9), int(rng() % 9)));
            const auto found = std::find(list.begin(), list.end(), c);
            if (found != list.end()) {
                expected++;
                list.erase(found);
            } else if (list.size() == n_slots) {
                list.pop_back();
            }
            list.push_front(c);
            text += c;
        }
        CHECK(hits(text, "lru", uint32_t(n_slots)) == expected);
    }
}

TEST_CASE("the random policy is the same for the same seed") {
    std::mt19937      rng(4);
    const random_case c = make_case(rng, "random");
    CHECK(run(c.routes, c.simulation).hits_high == run(c.routes, c.simulation).hits_high);
}

//
// errors
//

TEST_CASE("options that cannot be are refused") {
    const route_list routes = letters("AB");
    const auto       with   = [&](auto change) {
        hobbit_simulation o = options("lru", 1, 26, 1, 2);
        change(o);
        return refusal(routes, o);
    };
    CHECK(contains(with([](auto & o) { set(o, "hobbit.policy", "best"); }), "hobbit.policy is 'best': choose one of "));
    CHECK(contains(with([](auto & o) { set(o, { "hobbit.policy", 0.0, nullptr }); }), "hobbit.policy takes a text"));
    CHECK(contains(with([](auto & o) {
                       set(o, "hobbit.policy", "hobbit"), set(o, "hobbit.w_lru", 1.0), set(o, "hobbit.w_lfu", 0.5);
                   }),
                   "sum to 1.5"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.w_lru", 2.0); }), "hobbit.w_lru is 2"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.w_lhu", NAN); }), "is nan"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.t1", 0.8), set(o, "hobbit.t2", 0.5); }),
                   "hobbit.t1 (0.8) must not be above"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.t1", -0.1); }), "hobbit.t1 is -0.1"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.t2", 1.1); }), "hobbit.t2 is 1.1"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.t1", NAN); }), "hobbit.t1 is nan"));
    CHECK(contains(with([](auto & o) { set(o, "hobbit.rule", "gate"), set(o, "hobbit.price", 1.0); }),
                   "hobbit.price belongs to the rule price"));
    CHECK(contains(with([](auto & o) { o.bits_low = 0; }), "0 < low <= high"));
    CHECK(contains(with([](auto & o) { o.bits_high = 2; }), "0 < low <= high"));
    CHECK(contains(with([](auto & o) { o.bits_high = INFINITY; }), "0 < low <= high"));
    CHECK(contains(with([](auto & o) { o.n_used = 0; }), "at least one"));
    CHECK(contains(with([](auto & o) { o.n_layers = 0; }), "at least one"));
    CHECK(contains(with([](auto & o) { o.n_used = 27; }), "27 experts per token are more than the 26"));
    static const uint32_t too_many[] = { 2 };
    CHECK(contains(with([](auto & o) { o.n_used_by_layer = too_many; }),
                   "layer 0 uses 2 experts per token: make it 1 to 1"));
    CHECK(contains(with([](auto & o) { o.belady = 1, o.slots_low = 1; }), "one pool"));
    CHECK(contains(with([](auto & o) { o.belady = 1, set(o, "hobbit.t1", 0.5); }), "one pool"));
    CHECK(contains(with([](auto & o) { o.bits_high = 0; }), "0 < low <= high"));
}

TEST_CASE("layers use different numbers of experts") {
    route_list routes; // two experts in layer 0, one in layer 1
    for (const int32_t token : { 0, 1, 2 }) {
        for (const int32_t rank : { 0, 1 }) {
            routes.push_back({ 0, token, 0, (token + rank) % 3, 0.5f, 1 });
        }
        routes.push_back({ 0, token, 1, 0, 1.0f, 1 });
    }
    static const uint32_t n_used[] = { 2, 1 };
    for (const char * policy : { "lru", "echo", BELADY }) {
        hobbit_simulation o = options(policy, 2, 3, 2, 6);
        CHECK(contains(refusal(routes, o), "has 1 routes in a layer, not 2"));
        o.n_used_by_layer = n_used;
        set(o, "hobbit.predictor", "repeat");
        const auto result = run(routes, o);
        CHECK(result.misses_high == 4);
        CHECK(result.hits_high == 5);
        CHECK(result.predictable == 3);
        CHECK(result.predicted_right == 2); // the first token has nothing to learn from
    }
}

TEST_CASE("the C interface reports results and errors") {
    const route_list         routes = letters("ABACBA");
    hobbit_simulation        o      = options("lru", 1, 26, 1, 2);
    hobbit_simulation_result result;
    char                     err[64] = "";
    CHECK(hobbit_simulate(routes.data(), routes.size(), &o, &result, err, sizeof(err)));
    CHECK(result.hits_high == 1);

    set(o, "hobbit.policy", "best");
    CHECK_FALSE(hobbit_simulate(routes.data(), routes.size(), &o, &result, err, sizeof(err)));
    CHECK(std::string(err).size() == sizeof(err) - 1);
    char last[256];
    hobbit_last_error(last, sizeof(last));
    CHECK(contains(last, "hobbit.policy is 'best'"));
    hobbit_clear_last_error();
}

TEST_CASE("no routes, no results") {
    const hobbit_simulation_result r = run({}, options("lru", 1, 1, 1, 1));
    CHECK(r.n_tokens == 0);
    CHECK(r.penalty == 0.0);
}
