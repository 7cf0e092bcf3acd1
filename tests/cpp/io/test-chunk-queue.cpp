// SPDX-License-Identifier: MIT
#include "io/chunk-queue.h"

#include <doctest/doctest.h>

using namespace hobbit;

static constexpr size_t SIZE = 100;

static std::vector<chunk> chunks_of(load_state & state, part_id part, size_t n) {
    std::vector<chunk> chunks;
    for (size_t i = 0; i < n; i++) {
        chunks.push_back({ { 0, i * SIZE, SIZE, GGML_TYPE_F32 }, &state, part, nullptr });
    }
    return chunks;
}

// Numbers of the chunks that are taken within so many bytes; empty: none may begin.
static std::vector<uint64_t> take(chunk_queue & queue, size_t max_bytes, std::vector<chunk> * taken = nullptr) {
    std::vector<chunk>    own;
    std::vector<chunk> &  out = taken ? *taken : own;
    std::vector<uint64_t> numbers;
    const bool            may_begin = queue.take(max_bytes, out);
    CHECK(may_begin == !out.empty());
    for (const chunk & c : out) {
        CHECK(c.state->begun.has(c.part));
        numbers.push_back(c.offset / SIZE);
    }
    return numbers;
}

using numbers = std::vector<uint64_t>;

TEST_CASE("one chunk is taken, and as many as follow within the bytes") {
    chunk_queue queue;
    load_state  state;
    queue.push(chunks_of(state, part_id::up, 6), load_urgency::demand);
    CHECK(take(queue, 0) == numbers{ 0 });
    CHECK(take(queue, 2 * SIZE - 1) == numbers{ 1 });
    CHECK(take(queue, 2 * SIZE) == numbers{ 2, 3 });
    CHECK(take(queue, 100 * SIZE) == numbers{ 4, 5 });
    CHECK(take(queue, 100 * SIZE).empty());
}

TEST_CASE("a prefetch begins when no demand is queued, and few enough are in flight") {
    chunk_queue        queue(1);
    load_state         wanted, ahead;
    std::vector<chunk> demand, prefetch;
    queue.push(chunks_of(ahead, part_id::up, 1), load_urgency::prefetch);
    queue.push(chunks_of(wanted, part_id::up, 1), load_urgency::demand);
    CHECK(take(queue, 0, &demand) == numbers{ 0 });
    CHECK(demand.front().state == &wanted);
    CHECK(take(queue, 0, &prefetch) == numbers{ 0 }); // beside the demand in flight
    CHECK(prefetch.front().state == &ahead);
    queue.push(chunks_of(ahead, part_id::down, 1), load_urgency::prefetch);
    CHECK(take(queue, 0).empty());
    CHECK_FALSE(queue.end(demand.front()));
    CHECK(take(queue, 0).empty());
    CHECK(queue.end(prefetch.front()));
    CHECK(take(queue, 0) == numbers{ 0 });
}

TEST_CASE("several prefetched parts may be in flight, but are not taken together, and demands pass them") {
    chunk_queue        queue(4);
    load_state         first, second, wanted;
    std::vector<chunk> taken, next, last, demand;
    queue.push(chunks_of(first, part_id::up, 3), load_urgency::prefetch);
    queue.push(chunks_of(first, part_id::down, 1), load_urgency::prefetch);
    queue.push(chunks_of(second, part_id::up, 1), load_urgency::prefetch);
    CHECK(take(queue, 2 * SIZE, &taken) == numbers{ 0, 1 });
    CHECK(take(queue, 100 * SIZE, &next) == numbers{ 2 }); // and not the next part
    CHECK(next.front().part == part_id::up);
    queue.push(chunks_of(wanted, part_id::up, 1), load_urgency::demand);
    CHECK(take(queue, 0, &demand) == numbers{ 0 });
    CHECK(demand.front().state == &wanted);
    CHECK(take(queue, 0, &last) == numbers{ 0 });
    CHECK(last.front().part == part_id::down);
    for (const chunk & c : { taken[0], next[0], taken[1], last[0] }) {
        CHECK(queue.end(c));
    }
    CHECK_FALSE(queue.end(demand[0]));
}

TEST_CASE("prefetches that are demanded count as demands, queued or in flight") {
    chunk_queue        queue;
    load_state         state, other;
    std::vector<chunk> taken, rest;
    queue.push(chunks_of(state, part_id::up, 3), load_urgency::prefetch);
    queue.push(chunks_of(other, part_id::up, 1), load_urgency::prefetch);
    CHECK(take(queue, 0, &taken) == numbers{ 0 });
    CHECK(queue.promote(state, part_id::down) == 0);
    CHECK(queue.promote(state, part_id::up) == 3);
    CHECK(queue.promote(state, part_id::up) == 0);
    CHECK(take(queue, 100 * SIZE, &rest) == numbers{ 1, 2 }); // without waiting for the first
    CHECK_FALSE(queue.end(taken[0]));
    CHECK(take(queue, 0, &taken) == numbers{ 0 }); // the other
    CHECK_FALSE(queue.end(rest[0]));
    CHECK_FALSE(queue.end(rest[1]));
    CHECK(queue.end(taken[0])); // the other is a prefetch still
}

TEST_CASE("a batch in flight that is demanded ends as demands") {
    chunk_queue        queue;
    load_state         state, other;
    std::vector<chunk> taken, more;
    queue.push(chunks_of(state, part_id::up, 3), load_urgency::prefetch);
    CHECK(take(queue, 2 * SIZE, &taken) == numbers{ 0, 1 });
    CHECK(queue.promote(state, part_id::up) == 3);
    queue.push(chunks_of(other, part_id::up, 1), load_urgency::prefetch);
    CHECK(take(queue, 0, &more) == numbers{ 2 });
    for (const chunk & c : { taken[0], taken[1], more[0] }) {
        CHECK_FALSE(queue.end(c));
    }
    CHECK(take(queue, 0) == numbers{ 0 });
}

TEST_CASE("what is in flight when all is dropped still counts until it ends") {
    chunk_queue        queue;
    load_state         state, other;
    std::vector<chunk> taken;
    queue.push(chunks_of(state, part_id::up, 3), load_urgency::demand);
    CHECK(take(queue, 0, &taken) == numbers{ 0 });
    CHECK(queue.clear().size() == 2);
    queue.push(chunks_of(other, part_id::up, 1), load_urgency::prefetch);
    CHECK_FALSE(queue.end(taken[0]));
    CHECK(take(queue, 0) == numbers{ 0 });
}

TEST_CASE("what is dropped is not taken") {
    chunk_queue queue;
    load_state  state, other;
    for (const part_id part : { part_id::up, part_id::down }) {
        queue.push(chunks_of(state, part, 2), load_urgency::prefetch);
    }
    CHECK(queue.drop_prefetches(other, part_set::all()).empty());
    CHECK(queue.drop_prefetches(state, part_id::up).size() == 2);
    queue.push(chunks_of(other, part_id::up, 3), load_urgency::demand);
    CHECK(queue.drop_prefetches(other, part_set::all()).empty()); // demands are not
    CHECK(queue.clear().size() == 5);
    CHECK(take(queue, 100 * SIZE).empty());
    queue.push(chunks_of(state, part_id::up, 1), load_urgency::prefetch); // no demand is counted any more
    CHECK(take(queue, 0) == numbers{ 0 });
}
