// SPDX-License-Identifier: MIT
//
// Demands and prefetches in one queue: what overtakes, what is promoted, what can be cancelled.
#include "io/loader.h"

#include "fixtures/fake-reader.h"
#include "fixtures/loader-fixture.h"

#include <chrono>
#include <doctest/doctest.h>
#include <thread>
#include <vector>

using namespace hobbit;

TEST_CASE("a demand overtakes every prefetch that has not begun") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[4];
    loader      l(reader, counters, 1);

    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::prefetch);
    reader.wait_begun(1); // in flight: cannot be overtaken any more
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::prefetch);
    l.submit(states[2], part_id::up, block_at(2), { memory[2] }, load_urgency::prefetch);
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::demand);
    reader.open_gate();
    CHECK(reader.wait_begun(4) == std::vector<uint64_t>{ 0, 3 * BLOCK, 1 * BLOCK, 2 * BLOCK });
    for (load_state & state : states) {
        CHECK(l.wait(state, part_id::up).ok());
    }
}

TEST_CASE("a prefetch asked for again as a demand is promoted, and read once") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[4];
    loader      l(reader, counters, 1);

    for (size_t i = 0; i < 4; i++) {
        l.submit(states[i], part_id::up, block_at(i), { memory[i] }, load_urgency::prefetch);
    }
    reader.wait_begun(1);
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::demand);
    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::demand);   // in flight already
    l.submit(states[2], part_id::up, block_at(2), { memory[2] }, load_urgency::prefetch); // changes nothing
    reader.open_gate();
    for (load_state & state : states) {
        CHECK(l.wait(state, part_id::up).ok());
    }
    CHECK(reader.begun() == std::vector<uint64_t>{ 0, 3 * BLOCK, 1 * BLOCK, 2 * BLOCK });
    CHECK(counters.bytes_read == 4 * BLOCK);
}

TEST_CASE("prefetches leave one thread free, so that a demand begins at once") {
    fake_reader reader;
    stats       counters;
    blocks      memory(5);
    load_state  states[5];
    loader      l(reader, counters, 3);

    for (size_t i = 0; i < 3; i++) {
        l.submit(states[i], part_id::up, block_at(i), { memory[i] }, load_urgency::prefetch);
    }
    reader.wait_begun(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    CHECK(reader.begun().size() == 2);
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::demand);
    CHECK(reader.wait_begun(3).back() == 3 * BLOCK); // beside the reads in flight
    l.submit(states[4], part_id::up, block_at(4), { memory[4] }, load_urgency::demand);
    reader.let(1); // lets one read finish, so that only one thread takes the next
    CHECK(reader.wait_begun(4).back() == 4 * BLOCK);
    reader.open_gate();
    for (load_state & state : states) {
        CHECK(l.wait(state, part_id::up).ok());
    }
    CHECK(reader.begun().back() == 2 * BLOCK);
}

TEST_CASE("cancel drops the prefetches not begun, which may be asked for again") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[2];
    loader      l(reader, counters, 1);
    const auto  submit = [&](size_t i, part_id part, size_t block, load_urgency urgency) {
        l.submit(states[i], part, block_at(block), { memory[block] }, urgency);
    };

    submit(0, part_id::gate, 0, load_urgency::prefetch);
    reader.wait_begun(1); // in flight
    submit(0, part_id::up, 1, load_urgency::prefetch);
    submit(0, part_id::down, 2, load_urgency::prefetch);
    submit(1, part_id::up, 3, load_urgency::prefetch);
    l.cancel(states[0]);
    CHECK(l.requested(states[0]) == part_id::gate);
    CHECK(l.requested(states[1]) == part_id::up);
    CHECK_FALSE(l.settled(states[0]));
    CHECK_FALSE(l.settled(states[1]));
    reader.let(1);
    while (!l.settle(states[0])) {
    }
    CHECK(l.arrived(states[0], part_id::gate));

    submit(0, part_id::down, 2, load_urgency::demand);
    reader.open_gate();
    CHECK(l.wait(states[0], part_id::gate | part_id::down).ok());
    CHECK(l.wait(states[1], part_id::up).ok());
    CHECK(reader.begun() == std::vector<uint64_t>{ 0, 3 * BLOCK, 2 * BLOCK });

    l.cancel(states[0]); // arrived parts stay
    CHECK(l.arrived(states[0], part_id::gate | part_id::down));
    CHECK(l.settled(states[0]));
    CHECK(*memory[1] == 0);
}

TEST_CASE("cancel leaves demands alone, and prefetches that have become one") {
    fake_reader reader;
    stats       counters;
    blocks      memory(3);
    load_state  states[3];
    loader      l(reader, counters, 1);
    for (size_t i = 0; i < 3; i++) {
        l.submit(states[i], part_id::up, block_at(i), { memory[i] },
                 i == 1 ? load_urgency::demand : load_urgency::prefetch);
    }
    l.submit(states[2], part_id::up, block_at(2), { memory[2] }, load_urgency::demand);
    for (load_state & state : states) {
        l.cancel(state);
    }
    reader.open_gate();
    CHECK(l.wait(states[1], part_id::up).ok());
    CHECK(l.wait(states[2], part_id::up).ok());
}

TEST_CASE("a state that was cancelled wholly is settled at once") {
    fake_reader reader;
    stats       counters;
    blocks      memory(2);
    load_state  states[2];
    loader      l(reader, counters, 1);
    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::demand);
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::prefetch);
    std::thread waiter([&] {
        while (!l.settle(states[1])) {
        }
    });
    l.cancel(states[1]);
    waiter.join(); // while the gate is closed
    CHECK(l.requested(states[1]) == part_set());
    CHECK(l.settled(states[1]));
    l.reset(states[1]);
    reader.open_gate();
    while (!l.settle(states[0])) {
    }
    CHECK(reader.begun() == std::vector<uint64_t>{ 0 });
}

TEST_CASE("a prefetch counts as a demand from the moment it is demanded") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[4];
    loader      l(reader, counters, 3);

    // read ahead: no demand at all
    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::prefetch);
    reader.let(1);
    while (!l.settle(states[0])) {
    }
    CHECK(counters.bytes_prefetched == BLOCK);

    // demanded in flight, and before
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::prefetch);
    reader.wait_begun(2);
    l.submit(states[2], part_id::up, block_at(2), { memory[2] }, load_urgency::prefetch);
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::prefetch);
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::demand);
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::demand);
    reader.wait_begun(4);
    reader.open_gate();
    for (load_state & state : states) {
        CHECK(l.wait(state, part_id::up).ok());
    }
    CHECK(counters.bytes_read == 4 * BLOCK);
    CHECK(counters.bytes_prefetched == 2 * BLOCK); // blocks 0 and 2
}
