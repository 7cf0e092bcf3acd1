// SPDX-License-Identifier: MIT
#include "base/stats.h"

#include "hobbit.h"

#include <cmath>
#include <doctest/doctest.h>
#include <map>
#include <string>
#include <vector>

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
    s.prefetch_active        = true;
    s.stall_ns               = 2500000000;
    s.compute_ns             = 4500000000;
    s.transfer_ns            = 5500000000;

    const std::map<std::string, double> expected = {
        { "hits_high", 1 },        { "hits_low", 2 },         { "misses_high", 3 },      { "misses_low", 4 },
        { "selections_high", 5 },  { "selections_low", 6 },   { "host_hits_high", 7 },   { "selections_skipped", 8 },
        { "evictions", 9 },        { "reads", 10 },           { "bytes_read", 11 },      { "predicted", 12 },
        { "predicted_right", 13 }, { "prefetched", 14 },      { "prefetched_used", 15 }, { "bytes_prefetched", 16 },
        { "prefetch_pauses", 17 }, { "layers_computed", 18 }, { "waves", 19 },           { "prefetch_active", 1 },
        { "stall_s", 2.5 },        { "compute_s", 4.5 },      { "transfer_s", 5.5 },
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

// Values of the counters, in the order of their table; those without a name here are 0.
static std::vector<double> sample(const std::map<std::string, double> & named) {
    std::vector<double> values;
    for (size_t i = 0; const hobbit_counter * counter = hobbit_counter_at(i); i++) {
        const auto found = named.find(counter->name);
        values.push_back(found == named.end() ? 0.0 : found->second);
    }
    return values;
}

static hobbit_rates rates_of(const std::map<std::string, double> & before,
                             const std::map<std::string, double> & after) {
    return hobbit_get_rates(sample(before).data(), sample(after).data(), 2.0, 16);
}

TEST_CASE("rates follow from the changes between two samples") {
    const hobbit_rates found = rates_of({ { "hits_high", 10 }, { "stall_s", 1 } }, { { "selections_high", 120 },
                                                                                     { "selections_low", 40 },
                                                                                     { "hits_high", 16 },
                                                                                     { "misses_high", 2 },
                                                                                     { "host_hits_high", 1 },
                                                                                     { "bytes_read", 500 },
                                                                                     { "compute_s", 1.25 },
                                                                                     { "stall_s", 1.5 } });
    CHECK(found.tokens_per_s == 5); // 160 uses, 16 of a token, 2 seconds
    CHECK(found.hit_rate == 0.75);
    CHECK(found.hit_rate_high == 0.75);
    CHECK(std::isnan(found.hit_rate_low));
    CHECK(found.host_hit_rate == 0.5);
    CHECK(found.bytes_read_per_s == 250);
    CHECK(found.bytes_read_per_token == 50);
    CHECK(found.stall_share == 0.25);
    CHECK(found.expert_share == 0.375);
    CHECK(found.high_share == 0.75);
    CHECK(found.low_share == 0.25);
    CHECK(found.skipped_share == 0);
}

TEST_CASE("counters that began anew, and threads whose waits add up, give no strange rates") {
    const hobbit_rates found =
        rates_of({ { "hits_high", 9 }, { "bytes_read", 9 } }, { { "stall_s", 5 }, { "compute_s", 9 } });
    CHECK(found.tokens_per_s == 0);
    CHECK(std::isnan(found.hit_rate));
    CHECK(found.bytes_read_per_s == 0);
    CHECK(std::isnan(found.bytes_read_per_token));
    CHECK(found.stall_share == 1);
    CHECK(found.expert_share == 0);
}
