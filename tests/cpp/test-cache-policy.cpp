// SPDX-License-Identifier: MIT
#include "cache-policy.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <iterator>
#include <list>
#include <map>
#include <random>
#include <string>
#include <vector>

using namespace hobbit;

using trace = std::vector<expert_id>;

// A cache of nothing: drives a policy as the expert cache does, without memory or files. `group` uses in a row belong
// together, as the experts of one layer do: those present come first, and none of them makes room for another.
// One letter per use in the order of handling: h or m.
static std::string simulate(cache_policy & policy, size_t capacity, const trace & uses, size_t group = 1) {
    std::string outcome;
    trace       resident;
    const auto  is_resident = [&](const expert_id & id) {
        return std::find(resident.begin(), resident.end(), id) != resident.end();
    };
    for (size_t first = 0; first < uses.size(); first += group) {
        trace together(uses.begin() + ptrdiff_t(first), uses.begin() + ptrdiff_t(first + group));
        std::stable_partition(together.begin(), together.end(), is_resident);
        for (const expert_id & id : together) {
            outcome += is_resident(id) ? 'h' : 'm';
            if (!is_resident(id)) {
                if (resident.size() == capacity) {
                    trace evictable;
                    std::copy_if(resident.begin(), resident.end(), std::back_inserter(evictable), [&](const auto & r) {
                        return std::find(together.begin(), together.end(), r) == together.end();
                    });
                    const size_t victim = policy.pick_victim(evictable, id.layer);
                    REQUIRE(victim < evictable.size());
                    policy.on_evict(evictable[victim]);
                    resident.erase(std::find(resident.begin(), resident.end(), evictable[victim]));
                }
                policy.on_insert(id);
                resident.push_back(id);
            }
            policy.on_use(id);
        }
    }
    return outcome;
}

static size_t hits(const std::string & outcome) {
    return size_t(std::count(outcome.begin(), outcome.end(), 'h'));
}

// LRU with floors as its definition reads, by lists: the first in order of last use that no floor protects, else the
// first.
static std::string simulate_naively(size_t capacity, uint32_t floor, const trace & uses) {
    std::string          outcome;
    std::list<expert_id> by_last_use;
    for (const expert_id & id : uses) {
        const auto found  = std::find(by_last_use.begin(), by_last_use.end(), id);
        outcome          += found != by_last_use.end() ? 'h' : 'm';
        if (found != by_last_use.end()) {
            by_last_use.erase(found);
        } else if (by_last_use.size() == capacity) {
            std::map<uint32_t, uint32_t> held;
            for (const expert_id & other : by_last_use) {
                held[other.layer]++;
            }
            const auto victim = std::find_if(by_last_use.begin(), by_last_use.end(), [&](const expert_id & other) {
                return other.layer == id.layer || held[other.layer] > floor;
            });
            by_last_use.erase(victim != by_last_use.end() ? victim : by_last_use.begin());
        }
        by_last_use.push_back(id);
    }
    return outcome;
}

// Belady's optimum: evicts what is used again last.
static size_t most_hits(size_t capacity, const trace & uses) {
    size_t n = 0;
    trace  resident;
    for (size_t now = 0; now < uses.size(); now++) {
        if (std::find(resident.begin(), resident.end(), uses[now]) != resident.end()) {
            n++;
            continue;
        }
        if (resident.size() == capacity) {
            const auto next_use = [&](const expert_id & id) {
                return std::find(uses.begin() + ptrdiff_t(now), uses.end(), id) - uses.begin();
            };
            resident.erase(std::max_element(resident.begin(), resident.end(),
                                            [&](const auto & a, const auto & b) { return next_use(a) < next_use(b); }));
        }
        resident.push_back(uses[now]);
    }
    return n;
}

// What decoding looks like: each token passes through all layers and takes n_used experts of each, some more often.
static trace random_tokens(std::mt19937 & random, uint32_t n_layers, uint32_t n_experts, uint32_t n_used,
                           int n_tokens) {
    trace uses;
    for (int token = 0; token < n_tokens; token++) {
        for (uint32_t layer = 0; layer < n_layers; layer++) {
            for (uint32_t k = 0; k < n_used; k++) {
                const uint32_t low = std::min(random() % n_experts, random() % n_experts);
                uses.push_back({ layer, low });
            }
        }
    }
    return uses;
}

TEST_CASE("the least recently used expert leaves") {
    lru_policy policy(1, 4, 0);
    // capacity 2, one layer: 0 m, 1 m, 0 h, 2 m (1 leaves), 0 h, 1 m (2 leaves), 2 m (0 leaves), 1 h
    const trace uses = { { 0, 0 }, { 0, 1 }, { 0, 0 }, { 0, 2 }, { 0, 0 }, { 0, 1 }, { 0, 2 }, { 0, 1 } };
    CHECK(simulate(policy, 2, uses) == "mmhmhmmh");
}

TEST_CASE("a layer at its floor loses nothing to another layer") {
    lru_policy policy(2, 4, 1);
    // capacity 3, floor 1. 0.0 m, 1.0 m, 1.1 m; 1.2 m: layer 0 is at its floor, 1.0 leaves although 0.0 is older;
    // 0.0 h; 1.1 h; 0.1 m: layer 1 holds 1.1 and 1.2, 1.2 is older and leaves; 1.1 h; 0.0 h
    const trace uses = { { 0, 0 }, { 1, 0 }, { 1, 1 }, { 1, 2 }, { 0, 0 }, { 1, 1 }, { 0, 1 }, { 1, 1 }, { 0, 0 } };
    CHECK(simulate(policy, 3, uses) == "mmmmhhmhh");
}

TEST_CASE("a layer's own experts are never protected from it") {
    lru_policy policy(2, 4, 2);
    // capacity 4, both layers at their floor of 2: 0.2 replaces 0.0 (its layer's oldest), 1.0 and 1.1 stay
    const trace uses = { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 }, { 0, 2 }, { 1, 0 }, { 1, 1 }, { 0, 1 }, { 0, 0 } };
    CHECK(simulate(policy, 4, uses) == "mmmmmhhhm");
}

TEST_CASE("where everything is protected the least recently used leaves all the same") {
    lru_policy policy(3, 2, 1);
    // capacity 2, floor 1: 2.0 finds only layers at their floor: 0.0, the oldest, leaves
    const trace uses = { { 0, 0 }, { 1, 0 }, { 2, 0 }, { 1, 0 }, { 0, 0 } };
    CHECK(simulate(policy, 2, uses) == "mmmhm");
}

TEST_CASE("a cycle longer than the pool never hits without floors, and hits with them") {
    // 4 layers that use their experts 0 and 1 in every token, five tokens: a cycle of 8 for a pool of 5
    const trace token = { { 0, 0 }, { 0, 1 }, { 1, 0 }, { 1, 1 }, { 2, 0 }, { 2, 1 }, { 3, 0 }, { 3, 1 } };
    trace       uses;
    for (int i = 0; i < 5; i++) {
        uses.insert(uses.end(), token.begin(), token.end());
    }
    lru_policy no_floor(4, 2, 0);
    CHECK(hits(simulate(no_floor, 5, uses, 2)) == 0);

    // Floor 1. First token: 0.0 0.1 1.0 1.1 2.0 fill the pool; 2.1 replaces 0.0, 3.0 replaces 1.0 (layer 0 is at its
    // floor), 3.1 replaces 2.0: left are 0.1 1.1 2.1 3.0 3.1. Second token: 0.1 hits, 0.0 replaces 3.0; 1.1 hits, 1.0
    // replaces 0.1; 2.1 hits, 2.0 replaces 1.1; 3.1 hits, 3.0 replaces 2.1. Every layer holds one again, and so on.
    lru_policy with_floor(4, 2, 1);
    CHECK(simulate(with_floor, 5, uses, 2) == "mmmmmmmm"
                                              "hmhmhmhm"
                                              "hmhmhmhm"
                                              "hmhmhmhm"
                                              "hmhmhmhm");
}

TEST_CASE("capacity 1 hits only on repetition") {
    lru_policy  policy(2, 2, 0);
    const trace uses = { { 0, 0 }, { 0, 0 }, { 1, 0 }, { 0, 0 }, { 0, 0 }, { 0, 1 } };
    CHECK(simulate(policy, 1, uses) == "mhmmhm");
}

TEST_CASE("the even floor leaves a layer at work room for all that it uses") {
    CHECK(even_floor(100, 10, 8) == 8); // no more than one token needs
    CHECK(even_floor(80, 10, 8) == 8);  // 9 * 8 + 8
    CHECK(even_floor(79, 10, 8) == 7);
    CHECK(even_floor(50, 10, 8) == 4); // 9 * 5 + 8 would be 53
    CHECK(even_floor(9, 10, 8) == 0);
    CHECK(even_floor(4, 10, 8) == 0);
    CHECK(even_floor(5, 1, 8) == 8);
}

TEST_CASE("any pool that can keep an expert of every layer hits when a token is repeated") {
    trace uses;
    for (int token = 0; token < 4; token++) {
        for (uint32_t layer = 0; layer < 6; layer++) {
            for (uint32_t expert = 0; expert < 4; expert++) {
                uses.push_back({ layer, expert });
            }
        }
    }
    for (uint32_t capacity = 9; capacity <= 24; capacity++) { // 5 * 1 + 4 and more
        CAPTURE(capacity);
        lru_policy policy(6, 4, even_floor(capacity, 6, 4));
        // after the first token every layer finds its floor again, 6 experts at least in each of 3 tokens
        CHECK(hits(simulate(policy, capacity, uses, 4)) >= 18);
    }
}

TEST_CASE("random traces behave as the definition reads") {
    std::mt19937 random(1);
    for (int round = 0; round < 40; round++) {
        const uint32_t n_layers  = 1 + random() % 5;
        const uint32_t n_experts = 1 + random() % 8;
        const size_t   capacity  = 1 + random() % 16;
        const uint32_t floor     = random() % 4;
        const trace    uses      = random_tokens(random, n_layers, n_experts, 2, 40);
        CAPTURE(round);
        lru_policy policy(n_layers, n_experts, floor);
        CHECK(simulate(policy, capacity, uses) == simulate_naively(capacity, floor, uses));
    }
}

TEST_CASE("no trace beats Belady's optimum, and the policy reaches some of it") {
    std::mt19937 random(2);
    size_t       total_best = 0;
    size_t       total      = 0;
    for (int round = 0; round < 20; round++) {
        const trace    uses     = random_tokens(random, 4, 8, 2, 30);
        const size_t   capacity = 1 + random() % 20;
        const uint32_t floor    = even_floor(uint32_t(capacity), 4, 2);
        lru_policy     policy(4, 8, floor);
        const size_t   n    = hits(simulate(policy, capacity, uses));
        const size_t   best = most_hits(capacity, uses);
        CAPTURE(round);
        CHECK(n <= best);
        total      += n;
        total_best += best;
    }
    CHECK(total > 0);
    CHECK(total < total_best); // the bound is one: the traces do not fit
}
