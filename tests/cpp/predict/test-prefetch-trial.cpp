// SPDX-License-Identifier: MIT
//
// The trial of prefetch: passes with and without it, timed while tokens are generated.
#include "fixtures/prefetch-fixture.h"

#include <chrono>
#include <vector>

struct timed_passes {
    std::chrono::milliseconds lasted;
    uint64_t                  prefetched, used;
    bool                      is_active;
};

// Passes on a disk that takes a millisecond for a read, on a clock of their own. A layer computes for 8 ms, while the
// disk reads what was asked for ahead. The first layer always finds its experts, the other one's are never those of the
// pass before, and the router names them.
static timed_passes time_passes(uint32_t n_ahead, bool has_trials) {
    engine     e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } }, { 1, 1, { { 4, 0.3f }, { 6, 0.6f } } } }, 4, 0, {}, n_ahead);
    const auto begun = e.now;
    e.prefetch->set_trials(has_trials);
    e.reader.let(6);
    for (const uint32_t expert : { 0u, 1u }) {
        e.load({ 0, expert });
        REQUIRE(e.cache().acquire({ 0, expert }, tier_id::high)); // for ever
    }
    const auto holds = [&](int32_t expert) { return e.cache().holds({ 1, uint32_t(expert) }, tier_id::high, ALL); };
    const auto read  = [&](const std::vector<int32_t> & experts) { // returns the time that it takes
        e.reader.let(3 * experts.size());                         // their parts
        for (const int32_t expert : experts) {
            e.wait({ 1, uint32_t(expert) });
        }
        return std::chrono::milliseconds(3 * experts.size());
    };
    for (size_t i = 0; i < 30; i++) {
        const std::vector<int32_t> later = i % 2 == 0 ? std::vector<int32_t>{ 3, 5 } : std::vector<int32_t>{ 4, 6 };
        e.choose(0, { 0, 1 });
        e.look_ahead({ i % 2 });
        const bool is_ahead = holds(later[0]) && holds(later[1]);
        CHECK((is_ahead || (!holds(later[0]) && !holds(later[1]))));
        if (is_ahead) {
            CHECK(read(later) <= std::chrono::milliseconds(8)); // while the layer computes
        }
        e.now += std::chrono::milliseconds(8);
        e.finish(0, { 0, 1 });
        e.choose(1, later);
        const auto waited                 = is_ahead ? std::chrono::milliseconds(0) : read(later);
        e.counters.misses[tier_id::high] += is_ahead ? 0 : 2;
        e.counters.stall_ns              += uint64_t(std::chrono::nanoseconds(waited).count());
        e.now                            += waited + std::chrono::milliseconds(8);
        e.finish(1, later);
    }
    return { std::chrono::duration_cast<std::chrono::milliseconds>(e.now - begun), e.counters.prefetched,
             e.counters.prefetched_used, e.counters.prefetch_active };
}

TEST_CASE("a predictor that is always right wins on a disk of a set speed, and its trial says so") {
    const timed_passes without = time_passes(0, true), always = time_passes(1, false), judged = time_passes(1, true);
    CHECK(without.lasted.count() == 30 * 22);
    CHECK(without.prefetched == 0);
    CHECK(always.lasted.count() == 30 * 16);
    CHECK(always.prefetched == 2 * 30);
    CHECK(always.used == always.prefetched);
    CHECK(judged.lasted < without.lasted);
    CHECK(judged.is_active);
}

TEST_CASE("prefetch that costs time while tokens are generated pauses, and is tried again") {
    engine     e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 4, 0, {}, 1);
    const auto one_pass = [&] {
        const uint64_t before = e.counters.predicted;
        e.run_layer(0, { 0, 1 });
        e.choose(1, { 0, 1 });
        e.now               += std::chrono::milliseconds(e.counters.predicted > before ? 11 : 10);
        e.counters.stall_ns += 5000000;
        e.counters.misses[tier_id::high]++; // else it rests
        e.finish(1, { 0, 1 });
        return e.counters.predicted > before;
    };
    e.reader.open_gate();
    CHECK(e.counters.prefetch_active);
    size_t n_with = 0;
    size_t n      = 0;
    for (; e.counters.prefetch_active && n < 1000; n++) {
        n_with += one_pass();
    }
    CHECK(n <= prefetch_governor::warm_up + 2 * prefetch_governor::max_pairs + 1);
    CHECK(n - 1 - prefetch_governor::warm_up == 2 * (n_with - prefetch_governor::warm_up)); // in pairs
    CHECK(e.counters.prefetch_pauses == 1);
    for (size_t i = 0; i < prefetch_governor::min_pause - 1; i++) {
        CHECK_FALSE(one_pass());
    }
    CHECK(one_pass());
}

TEST_CASE("prefetch that saves time stays on") {
    engine e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 4, 0, {}, 1);
    e.reader.open_gate();
    for (size_t i = 0; i < 100; i++) {
        const uint64_t before = e.counters.predicted;
        e.run_layer(0, { 0, 1 });
        e.choose(1, { 3, 5 });
        e.now               += std::chrono::milliseconds(e.counters.predicted > before ? 9 : 10);
        e.counters.stall_ns += 5000000;
        e.finish(1, { 3, 5 });
        e.load({ 2, uint32_t(i % 8) }); // a used expert must be fetched again
        e.load({ 2, uint32_t((i + 1) % 8) });
    }
    CHECK(e.counters.prefetch_active);
    CHECK(e.counters.prefetch_pauses == 0);
    CHECK(e.counters.prefetched > prefetch_governor::min_experts);
    CHECK(e.counters.prefetched_used == e.counters.prefetched);
}

TEST_CASE("prompts are always prefetched, and are no part of a trial") {
    engine                     e({ { 1, 0, { { 3, 0.3f }, { 5, 0.6f } } } }, 8, 0, {}, 1);
    const size_t               n_tokens = batch_info::max_generated + 1;
    const std::vector<size_t>  topics(n_tokens, 0);
    const std::vector<int32_t> chosen = [&] {
        std::vector<int32_t> all;
        for (size_t i = 0; i < n_tokens; i++) {
            all.insert(all.end(), { 0, 1 });
        }
        return all;
    }();
    e.reader.open_gate();
    for (size_t i = 0; i < prefetch_governor::warm_up + 2 * prefetch_governor::min_pairs + 2; i++) {
        const uint64_t before = e.counters.predicted;
        e.run_layer(0, chosen, topics);
        e.choose(1, { 0, 1 });
        e.now += std::chrono::milliseconds(i % 2 ? 10 : 11);
        e.finish(1, { 0, 1 });
        CHECK(e.counters.predicted > before);
    }
    CHECK(e.counters.prefetch_pauses == 0);
}
