// SPDX-License-Identifier: MIT
#include "policy/cache-policy.h"

#include <cmath>
#include <doctest/doctest.h>
#include <vector>

using namespace hobbit;

static std::vector<expert_id> uses_of(const token_memory & memory, uint64_t token) {
    std::vector<expert_id> found;
    memory.visit_uses(token, [&](expert_id id) { found.push_back(id); });
    return found;
}

TEST_CASE("a token is found by its number until the capacity is used up") {
    token_memory memory(1, 4, 2, 3);
    CHECK_FALSE(memory.remembers(0));
    CHECK_FALSE(memory.remembers(token_memory::none));
    for (uint64_t token = 0; token < 5; token++) {
        CHECK(memory.add(token_memory::none) == token);
        CHECK(memory.remembers(token));
        CHECK(memory.slot(token) == token % 3);
    }
    CHECK(memory.first() == 2);
    CHECK(memory.last() == 5);
    CHECK_FALSE(memory.remembers(1));
    CHECK(memory.remembers(2));
    CHECK_FALSE(memory.remembers(5));
}

TEST_CASE("tokens are linked to those before and after them, as long as both are remembered") {
    token_memory   memory(1, 4, 2, 3);
    const uint64_t a = memory.add(token_memory::none);
    const uint64_t b = memory.add(token_memory::none); // a token of another sequence
    const uint64_t c = memory.add(a);
    CHECK(memory.before(a) == token_memory::none);
    CHECK(memory.after(a) == c);
    CHECK(memory.before(c) == a);
    CHECK(memory.after(b) == token_memory::none);
    CHECK(memory.after(c) == token_memory::none);
    const uint64_t d = memory.add(b); // a is forgotten
    CHECK_FALSE(memory.remembers(a));
    CHECK(memory.before(c) == token_memory::none);
    CHECK(memory.after(b) == d);
    const uint64_t e = memory.add(a); // follows what is forgotten
    CHECK(memory.before(e) == token_memory::none);
}

TEST_CASE("a token may use hundreds of experts, which are all forgotten with it") {
    token_memory       memory(1, 896, 300, 1);
    std::vector<float> scores(1);
    for (uint32_t expert = 0, token = memory.add(token_memory::none); expert < 300; expert++) {
        memory.use(token, { 0, expert + 500 }, 0.5);
    }
    CHECK(uses_of(memory, 0).size() == 300);
    memory.add(token_memory::none);
    for (uint32_t expert = 0; expert < 896; expert++) {
        memory.add_similarity({ 0, expert }, 1.0, scores);
    }
    CHECK(scores[0] == 0.0f);
}

TEST_CASE("the uses of a token, from a layer on") {
    token_memory   memory(3, 4, 2, 2);
    const uint64_t token = memory.add(token_memory::none);
    memory.use(token, { 0, 3 }, 1.0);
    memory.use(token, { 2, 1 }, 0.5);
    memory.use(token, { 2, 0 }, 0.5);
    CHECK(uses_of(memory, token) == std::vector<expert_id>{ { 0, 3 }, { 2, 1 }, { 2, 0 } });
    memory.add(token_memory::none);
    const uint64_t same_slot = memory.add(token_memory::none);
    CHECK(memory.slot(same_slot) == memory.slot(token));
    CHECK(uses_of(memory, same_slot).empty());
}

TEST_CASE("similarity is the sum of the roots of the products of the weights") {
    token_memory   memory(2, 4, 2, 4);
    const uint64_t a = memory.add(token_memory::none);
    memory.use(a, { 0, 0 }, 0.75);
    memory.use(a, { 0, 1 }, 0.25);
    const uint64_t b = memory.add(a);
    memory.use(b, { 0, 1 }, 1.0);
    std::vector<float> scores(4, 0.0f);
    memory.add_similarity({ 0, 0 }, 0.75, scores);
    CHECK(scores[0] == doctest::Approx(0.75).epsilon(0.01));
    CHECK(scores[1] == 0.0f);
    memory.add_similarity({ 0, 1 }, 0.25, scores);
    CHECK(scores[0] == doctest::Approx(1.0).epsilon(0.01)); // as like as can be
    CHECK(scores[1] == doctest::Approx(0.5).epsilon(0.01));
    CHECK(scores[2] == 0.0f);
    memory.add_similarity({ 1, 0 }, 1.0, scores); // the same expert of another layer is another expert
    CHECK(scores[0] == doctest::Approx(1.0).epsilon(0.01));
}

TEST_CASE("a forgotten token is like nothing") {
    token_memory   memory(1, 4, 1, 2);
    const uint64_t a = memory.add(token_memory::none);
    memory.use(a, { 0, 2 }, 1.0);
    memory.add(a);
    memory.add(token_memory::none); // takes the slot of a
    std::vector<float> scores(2, 0.0f);
    memory.add_similarity({ 0, 2 }, 1.0, scores);
    CHECK(scores == std::vector<float>{ 0.0f, 0.0f });
}
