// SPDX-License-Identifier: MIT
#include "io/loader.h"

#include "fixtures/fake-reader.h"
#include "fixtures/loader-fixture.h"

#include <chrono>
#include <deque>
#include <doctest/doctest.h>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

using namespace hobbit;

TEST_CASE("what was asked for arrives where it was asked for") {
    fake_reader reader;
    stats       counters;
    blocks      memory(2);
    load_state  state;
    loader      l(reader, counters, 1);

    l.submit(state, part_id::up, block_at(7), { memory[0] }, load_urgency::demand);
    l.submit(state, part_id::down, block_at(9), { memory[1] }, load_urgency::demand);
    CHECK(l.requested(state) == (part_id::up | part_id::down));
    CHECK_FALSE(l.arrived(state, part_id::up));

    reader.let(1);
    CHECK(l.wait(state, part_id::up).ok());
    CHECK(l.arrived(state, part_id::up));
    CHECK_FALSE(l.arrived(state, part_id::up | part_id::down));
    CHECK(*memory[0] == 7);

    reader.let(1);
    CHECK(l.wait(state, part_id::up | part_id::down).ok());
    CHECK(*memory[1] == 9);
}

TEST_CASE("a part that begins within a block is read with the blocks around it") {
    fake_reader reader;
    stats       counters;
    blocks      memory(3);
    load_state  state;
    reader.open_gate();
    loader l(reader, counters, 1);

    // bytes 4196 ... 8295 touch the blocks 1 and 2
    const part_location location = { 0, BLOCK + 100, BLOCK + 4, GGML_TYPE_F32 };
    CHECK(data_offset(location) == 100);
    CHECK(aligned_span(location) == 2 * BLOCK);
    l.submit(state, part_id::up, location, { memory[0] }, load_urgency::demand);
    CHECK(l.wait(state, part_id::up).ok());
    CHECK(reader.begun() == std::vector<uint64_t>{ BLOCK });
    CHECK(memory[0][100] == 1);
    CHECK(memory[1][100 + 3] == 2);
    CHECK(memory[2][0] == 0); // nothing beyond
    CHECK(counters.bytes_read == 2 * BLOCK);
    CHECK(counters.reads == 1);
}

TEST_CASE("the span has room for a part wherever it begins") {
    // from the first byte of a block to its last, sizes around a block
    for (const uint64_t offset : { 0, 1, 32, 4095, 4096, 4097 }) {
        for (const uint64_t size : { 1, 4095, 4096, 4097 }) {
            const part_location location = { 0, offset, size, GGML_TYPE_F32 };
            CAPTURE(offset);
            CAPTURE(size);
            const size_t span = aligned_span(location);
            CHECK(span % BLOCK == 0);
            CHECK(span >= data_offset(location) + size);
            CHECK(span < data_offset(location) + size + BLOCK);
        }
    }
}

TEST_CASE("the time in which computation waits for a read counts once") {
    fake_reader reader;
    stats       counters;
    blocks      memory(1);
    load_state  state;
    // asked when a read begins, and by who has waited for so long
    const auto  patience = std::chrono::milliseconds(20);
    size_t      n_asked  = 0;
    awake_clock clock([&] {
        if (++n_asked > 2) {
            reader.open_gate();
        }
        return awake_clock::time_point();
    });
    loader      l(reader, counters, 1, {}, ggml_backend_cpu_buffer_type(), patience, std::move(clock));
    l.submit(state, part_id::up, block_at(0), { memory[0] }, load_urgency::demand);
    reader.wait_begun(1);
    const auto start = std::chrono::steady_clock::now();
    CHECK(l.wait(state, part_id::up).ok());
    const auto     took    = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start);
    const uint64_t stalled = counters.stall_ns;
    CHECK(stalled <= uint64_t(took.count()));
    CHECK(stalled >= uint64_t(std::chrono::nanoseconds(patience).count()));
    CHECK(l.wait(state, part_id::up).ok()); // it is there
    CHECK(counters.stall_ns == stalled);
}

TEST_CASE("after an error nothing is on the way, and states can be given up") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[4];
    loader      l(reader, counters, 1);
    reader.fail_at(0, "the disk is gone");
    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::prefetch);
    reader.wait_begun(1);
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::prefetch);
    l.submit(states[2], part_id::up, block_at(2), { memory[2] }, load_urgency::demand);
    reader.open_gate();
    CHECK(l.wait(states[2], part_id::up).message() == "the disk is gone");
    l.submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::prefetch);
    for (load_state & state : states) {
        while (!l.settle(state)) {
        }
        CHECK(l.settled(state));
        l.cancel(state);
        l.reset(state);
    }
    CHECK(reader.begun().size() == 1);
    CHECK(counters.bytes_prefetched == 0);
}

TEST_CASE("a part that has arrived is not read again, until it was reset") {
    fake_reader reader;
    stats       counters;
    blocks      memory(1);
    load_state  state;
    reader.open_gate();
    loader l(reader, counters, 1);

    l.submit(state, part_id::up, block_at(5), { memory[0] }, load_urgency::demand);
    CHECK(l.wait(state, part_id::up).ok());
    l.submit(state, part_id::up, block_at(5), { memory[0] }, load_urgency::demand);
    CHECK(l.wait(state, part_id::up).ok());
    CHECK(reader.begun().size() == 1);

    l.reset(state);
    CHECK(l.requested(state) == part_set());
    CHECK_FALSE(l.arrived(state, part_id::up));
    l.submit(state, part_id::up, block_at(6), { memory[0] }, load_urgency::demand);
    CHECK(l.wait(state, part_id::up).ok());
    CHECK(reader.begun().size() == 2);
    CHECK(*memory[0] == 6);
}

TEST_CASE("an error reaches every waiter, and nothing is read after it") {
    fake_reader reader;
    stats       counters;
    blocks      memory(4);
    load_state  states[4];
    auto        l = std::make_unique<loader>(reader, counters, 1);
    reader.fail_at(1 * BLOCK, "the disk is gone");

    for (size_t i = 0; i < 3; i++) {
        l->submit(states[i], part_id::up, block_at(i), { memory[i] }, load_urgency::demand);
    }
    std::vector<std::string> answers(3);
    std::vector<std::thread> waiters;
    for (size_t i = 0; i < 3; i++) {
        waiters.emplace_back([&, i] { answers[i] = l->wait(states[1 + i % 2], part_id::up).message(); });
    }
    reader.open_gate();
    for (std::thread & waiter : waiters) {
        waiter.join();
    }
    CHECK(answers == std::vector<std::string>(3, "the disk is gone"));

    l->submit(states[3], part_id::up, block_at(3), { memory[3] }, load_urgency::demand);
    CHECK(l->wait(states[3], part_id::up).message() == "the disk is gone");
    CHECK(l->wait(states[0], part_id::up).message() == "the disk is gone"); // although it had arrived
    l.reset();
    CHECK(reader.begun() == std::vector<uint64_t>{ 0, 1 * BLOCK });
    CHECK(counters.bytes_read == BLOCK);
}

TEST_CASE("of several errors the first one stays") {
    constexpr size_t N = 8;
    fake_reader      reader;
    stats            counters;
    blocks           memory(N);
    load_state       states[N];
    loader           l(reader, counters, N);
    for (size_t i = 0; i < N; i++) {
        reader.fail_at(i * BLOCK, "error " + std::to_string(i));
        l.submit(states[i], part_id::up, block_at(i), { memory[i] }, load_urgency::demand);
    }
    reader.wait_begun(N); // all in flight: each will report its own
    reader.let(1);
    const std::string first = l.wait(states[0], part_id::up).message();
    CHECK(first.find("error ") == 0);
    reader.open_gate();
    for (int i = 0; i < 1000; i++) { // while the others come in
        REQUIRE(l.wait(states[size_t(i) % N], part_id::up).message() == first);
        std::this_thread::yield();
    }
}

TEST_CASE("the destructor lets the read in flight end and drops those queued") {
    fake_reader            reader;
    stats                  counters;
    blocks                 memory(1);
    std::deque<load_state> states(20000);
    auto                   l = std::make_unique<loader>(reader, counters, 1);
    for (load_state & state : states) {
        l->submit(state, part_id::up, block_at(1), { memory[0] }, load_urgency::demand);
    }
    reader.wait_begun(1);

    std::promise<void> destroying;
    std::thread        destroyer([&] {
        destroying.set_value();
        l.reset();
        reader.close();
    });
    destroying.get_future().wait();
    reader.let_one_by_one_until_closed(); // reads follow each other until the destructor has had its turn
    destroyer.join();
    const size_t n = reader.begun().size();
    CHECK(n < states.size());
    CHECK(counters.bytes_read == n * BLOCK); // reads that had begun were finished
}

TEST_CASE("idle threads are joined") {
    fake_reader reader;
    stats       counters;
    {
        loader l(reader, counters, 4);
    }
    CHECK(reader.begun().empty());
}

TEST_CASE("several threads wait for several parts") {
    fake_reader reader;
    stats       counters;
    blocks      memory(6);
    load_state  states[6];
    loader      l(reader, counters, 3);
    for (size_t i = 0; i < 6; i++) {
        l.submit(states[i], part_id::down, block_at(i + 1), { memory[i] }, load_urgency::demand);
    }
    std::vector<char>        seen(6, 0);
    std::vector<std::thread> waiters;
    for (size_t i = 0; i < 6; i++) {
        waiters.emplace_back([&, i] {
            if (l.wait(states[i], part_id::down).ok()) {
                seen[i] = *memory[i];
            }
        });
    }
    reader.open_gate();
    for (std::thread & waiter : waiters) {
        waiter.join();
    }
    CHECK(seen == std::vector<char>{ 1, 2, 3, 4, 5, 6 });
    CHECK(counters.bytes_read == 6 * BLOCK);
}

TEST_CASE("waiting for the disk is counted, waiting for nothing is not; times do not add up") {
    fake_reader reader;
    stats       counters;
    blocks      memory(2);
    load_state  states[2];
    const auto  start = std::chrono::steady_clock::now();
    loader      l(reader, counters, 2);
    l.submit(states[0], part_id::up, block_at(0), { memory[0] }, load_urgency::demand);
    l.submit(states[1], part_id::up, block_at(1), { memory[1] }, load_urgency::demand);
    reader.wait_begun(2);
    std::thread waiter([&] { CHECK(l.wait(states[0], part_id::up).ok()); });
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    reader.open_gate();
    waiter.join();
    CHECK(l.wait(states[1], part_id::up).ok());
    const uint64_t stalled = counters.stall_ns;
    CHECK(stalled <= uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count()));
    CHECK(l.wait(states[0], part_id::up).ok());
    CHECK(counters.stall_ns == stalled);
}

TEST_CASE("many requests from many threads all arrive") {
    fake_reader reader;
    stats       counters;
    reader.open_gate();
    constexpr size_t       N_THREADS  = 4;
    constexpr size_t       N_REQUESTS = 150;
    blocks                 memory(N_THREADS * N_REQUESTS);
    std::deque<load_state> states(N_THREADS * N_REQUESTS);
    std::vector<size_t>    wrong(N_THREADS, 0);
    {
        loader                   l(reader, counters, 3);
        std::vector<std::thread> users;
        for (size_t t = 0; t < N_THREADS; t++) {
            users.emplace_back([&, t] {
                std::mt19937 random{ unsigned(t) };
                for (size_t i = 0; i < N_REQUESTS; i++) {
                    const size_t       n       = t * N_REQUESTS + i;
                    const load_urgency urgency = random() % 2 ? load_urgency::demand : load_urgency::prefetch;
                    l.submit(states[n], part_id::up, block_at(n), { memory[n] }, urgency);
                    if (random() % 4 == 0) {
                        l.cancel(states[n]);
                        l.submit(states[n], part_id::up, block_at(n), { memory[n] }, load_urgency::prefetch);
                    }
                    if (random() % 4 == 0) {
                        l.submit(states[n], part_id::up, block_at(n), { memory[n] }, load_urgency::demand);
                        wrong[t] += !l.wait(states[n], part_id::up).ok();
                    }
                }
                for (size_t i = 0; i < N_REQUESTS; i++) {
                    const size_t n  = t * N_REQUESTS + i;
                    wrong[t]       += !l.wait(states[n], part_id::up).ok();
                    wrong[t]       += *memory[n] != fake_reader::byte_at(n * BLOCK);
                }
            });
        }
        for (std::thread & user : users) {
            user.join();
        }
    }
    CHECK(wrong == std::vector<size_t>(N_THREADS, 0));
    CHECK(counters.bytes_read == N_THREADS * N_REQUESTS * BLOCK);
}

TEST_CASE("a read that does not return is an error after a while, of every wait") {
    using namespace std::chrono_literals;
    fake_reader reader;
    stats       counters;
    blocks      memory(2);
    load_state  states[2];
    {
        loader l(reader, counters, 1, {}, ggml_backend_cpu_buffer_type(), 50ms);
        CHECK(l.oldest_read() == 0ms);
        l.submit(states[0], part_id::up, block_at(7), { memory[0] }, load_urgency::demand);
        l.submit(states[1], part_id::up, block_at(8), { memory[1] }, load_urgency::prefetch);
        CHECK(l.wait(states[0], part_id::up).message().find("the disk has not answered a read") == 0);
        CHECK(l.oldest_read() >= 50ms);
        CHECK(l.wait(states[1], part_id::up).message() == l.error().message());
        l.abandon(states[0]);
        CHECK_FALSE(l.end());
        reader.open_gate();
        while (l.oldest_read() > 0ms) {
            std::this_thread::yield();
        }
        CHECK(l.end());
    }
    CHECK(reader.begun() == std::vector<uint64_t>{ 7 * BLOCK }); // nothing more
}

TEST_CASE("a slow read that returns in time is no error") {
    fake_reader reader;
    stats       counters;
    blocks      memory(1);
    load_state  state;
    loader      l(reader, counters, 1, {}, ggml_backend_cpu_buffer_type(), std::chrono::minutes(1));
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        reader.open_gate();
    });
    l.submit(state, part_id::up, block_at(7), { memory[0] }, load_urgency::demand);
    CHECK(l.wait(state, part_id::up).ok());
    later.join();
    CHECK(l.oldest_read().count() == 0);
}

TEST_CASE("time in which the process was stopped is not a read's") {
    fake_reader             reader;
    stats                   counters;
    blocks                  memory(1);
    load_state              state;
    std::mutex              mutex;
    awake_clock::time_point real;
    const auto              source = [&] {
        std::lock_guard<std::mutex> lock(mutex);
        return real;
    };
    loader l(reader, counters, 1, {}, ggml_backend_cpu_buffer_type(), std::chrono::minutes(1), awake_clock(source));
    l.submit(state, part_id::up, block_at(7), { memory[0] }, load_urgency::demand);
    reader.wait_begun(1);
    {
        std::lock_guard<std::mutex> lock(mutex);
        real += std::chrono::hours(1);
    }
    CHECK(l.oldest_read() == std::chrono::seconds(1));
    reader.open_gate();
    CHECK(l.wait(state, part_id::up).ok());
}
