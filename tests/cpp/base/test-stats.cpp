// SPDX-License-Identifier: MIT
#include "base/stats.h"

#include "hobbit.h"

#include <doctest/doctest.h>
#include <map>
#include <string>

using namespace hobbit;

TEST_CASE("every counter is told under its own name, times in seconds") {
    stats s;
    s.hits[tier_id(0)]       = 1;
    s.hits[tier_id(1)]       = 2;
    s.misses[tier_id(0)]     = 3;
    s.misses[tier_id(1)]     = 4;
    s.selections[tier_id(0)] = 5;
    s.selections[tier_id(1)] = 6;
    s.host_hits[tier_id(0)]  = 7;
    s.selections_skipped     = 8;
    s.evictions              = 9;
    s.reads                  = 10;
    s.bytes_read             = 11;
    s.predicted              = 12;
    s.predicted_right        = 13;
    s.prefetched             = 14;
    s.prefetched_used        = 15;
    s.bytes_prefetched       = 16;
    s.prefetch_pauses        = 17;
    s.layers_computed        = 18;
    s.waves                  = 19;
    s.tokens_repeated        = 20;
    s.prefetch_active        = true;
    s.stall_ns               = 2500000000;
    s.compute_ns             = 4500000000;
    s.transfer_ns            = 5500000000;

    const std::map<std::string, double> expected = {
        { "hits_high", 1 },        { "hits_low", 2 },         { "misses_high", 3 },      { "misses_low", 4 },
        { "selections_high", 5 },  { "selections_low", 6 },   { "host_hits_high", 7 },   { "selections_skipped", 8 },
        { "evictions", 9 },        { "reads", 10 },           { "bytes_read", 11 },      { "predicted", 12 },
        { "predicted_right", 13 }, { "prefetched", 14 },      { "prefetched_used", 15 }, { "bytes_prefetched", 16 },
        { "prefetch_pauses", 17 }, { "layers_computed", 18 }, { "waves", 19 },           { "tokens_repeated", 20 },
        { "prefetch_active", 1 },  { "stall_s", 2.5 },        { "compute_s", 4.5 },      { "transfer_s", 5.5 },
    };
    std::map<std::string, double> told;
    for (size_t i = 0; const hobbit_counter * counter = hobbit_counter_at(i); i++) {
        if (expected.count(counter->name) > 0) {
            told[counter->name] = s.value(i);
        } else {
            CHECK_MESSAGE(s.value(i) == 0, counter->name);
        }
    }
    CHECK(told == expected);
}
