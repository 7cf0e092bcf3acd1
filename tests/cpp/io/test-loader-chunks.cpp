// SPDX-License-Identifier: MIT
//
// Parts that are read in several chunks.
#include "fixtures/loader-fixture.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <vector>

static constexpr size_t CHUNK = loader::chunk_size / BLOCK; // in blocks

TEST_CASE("several threads read one large part, which has arrived when all of it has") {
    constexpr size_t N = 3 * CHUNK + 1;
    fake_reader      reader;
    stats            counters;
    blocks           memory(N + 1);
    load_state       state;
    loader           l(reader, counters, 4);

    const part_location location = { 0, 5 * BLOCK + 32, (N - 1) * BLOCK + 64, GGML_TYPE_F32 };
    l.submit(state, part_id::up, location, { memory[0] }, load_urgency::demand);
    std::vector<uint64_t> begun = reader.wait_begun(4);
    std::sort(begun.begin(), begun.end());
    for (size_t i = 0; i < 4; i++) {
        CHECK(begun[i] == (5 + i * CHUNK) * BLOCK);
    }
    reader.let(3);
    CHECK_FALSE(l.arrived(state, part_id::up));
    reader.open_gate();
    CHECK(l.wait(state, part_id::up).ok());
    for (size_t i = 0; i < N; i++) {
        REQUIRE(*memory[i] == fake_reader::byte_at((5 + i) * BLOCK));
    }
    CHECK(*memory[N] == 0); // nothing beyond
    CHECK(counters.bytes_read == N * BLOCK);
    CHECK(l.settled(state));
}

TEST_CASE("an error in one chunk is an error of its part, given up when its other chunks have ended") {
    fake_reader reader;
    stats       counters;
    blocks      memory(3 * CHUNK);
    load_state  state;
    loader      l(reader, counters, 2);
    reader.fail_at(0, "the disk is gone");
    l.submit(state, part_id::up, block_at(0, 3 * CHUNK), { memory[0] }, load_urgency::demand);
    reader.wait_begun(2);
    reader.open_gate();
    CHECK(l.wait(state, part_id::up).message() == "the disk is gone");
    while (!l.settle(state)) {
    }
    CHECK(l.requested(state) == part_set());
    CHECK_FALSE(l.arrived(state, part_id::up));
}

TEST_CASE("between the chunks of a prefetch a demand comes first; a prefetch begun is not cancelled") {
    fake_reader reader;
    stats       counters;
    blocks      memory(2 * CHUNK + 1);
    load_state  states[2];
    loader      l(reader, counters, 2);
    l.submit(states[0], part_id::up, block_at(0, 2 * CHUNK), { memory[0] }, load_urgency::prefetch);
    reader.wait_begun(1);
    l.submit(states[1], part_id::up, block_at(2 * CHUNK), { memory[2 * CHUNK] }, load_urgency::demand);
    CHECK(reader.wait_begun(2) == std::vector<uint64_t>{ 0, 2 * CHUNK * BLOCK });
    l.cancel(states[0]);
    CHECK(l.requested(states[0]) == part_id::up);
    reader.open_gate();
    while (!l.settle(states[0])) {
    }
    CHECK(l.arrived(states[0], part_id::up));
    CHECK(l.wait(states[1], part_id::up).ok());
    CHECK(reader.begun() == std::vector<uint64_t>{ 0, 2 * CHUNK * BLOCK, CHUNK * BLOCK });
    CHECK(counters.bytes_prefetched == 2 * CHUNK * BLOCK);
}

TEST_CASE("a prefetch half read can be abandoned, and asked for again") {
    fake_reader reader;
    stats       counters;
    blocks      memory(3 * CHUNK + 1);
    load_state  states[2];
    loader      l(reader, counters, 1);
    l.submit(states[0], part_id::up, block_at(0, 3 * CHUNK), { memory[0] }, load_urgency::prefetch);
    reader.wait_begun(1);
    l.submit(states[1], part_id::up, block_at(3 * CHUNK), { memory[3 * CHUNK] }, load_urgency::demand);
    reader.let(1);
    l.abandon(states[0]); // the demand is still under way
    CHECK(l.requested(states[0]) == part_set());
    CHECK_FALSE(l.arrived(states[1], part_id::up));
    l.submit(states[0], part_id::up, block_at(0, 3 * CHUNK), { memory[0] }, load_urgency::demand);
    reader.open_gate();
    CHECK(l.wait(states[0], part_id::up).ok());
    CHECK(*memory[3 * CHUNK - 1] == fake_reader::byte_at((3 * CHUNK - 1) * BLOCK));
    CHECK(counters.bytes_read == (4 * CHUNK + 1) * BLOCK);
}

TEST_CASE("a prefetch of several chunks becomes a demand as a whole") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4 * CHUNK);
    load_state  states[2];
    loader      l(reader, counters, 2);
    l.submit(states[1], part_id::up, block_at(3 * CHUNK, CHUNK), { memory[3 * CHUNK] }, load_urgency::prefetch);
    l.submit(states[0], part_id::up, block_at(0, 3 * CHUNK), { memory[0] }, load_urgency::prefetch);
    reader.let(1);
    while (!l.settle(states[1])) {
    }
    reader.wait_begun(2); // the first chunk of the other
    l.submit(states[0], part_id::up, block_at(0, 3 * CHUNK), { memory[0] }, load_urgency::demand);
    reader.wait_begun(3); // and now the next one beside it
    reader.open_gate();
    CHECK(l.wait(states[0], part_id::up).ok());
    CHECK(counters.bytes_prefetched == CHUNK * BLOCK);
    CHECK(counters.bytes_read == 4 * CHUNK * BLOCK);
}
