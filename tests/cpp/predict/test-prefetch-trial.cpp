// SPDX-License-Identifier: MIT
//
// The trial of prefetch: passes with and without it, timed while tokens are generated.
#include "fixtures/prefetch-fixture.h"

#include <vector>

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
