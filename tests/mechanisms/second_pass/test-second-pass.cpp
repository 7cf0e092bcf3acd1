// SPDX-License-Identifier: MIT
#include "doors/batch-passes.h"
#include "fixtures/numbers.h"
#include "mechanisms/second_pass/second-pass-settings.h"

#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using namespace hobbit;

namespace {

const rule_numbers LITTLE = numbers(0.5, 0.5, 0.0, 0.7);

// Sequence 2 has no confidence, the others have one of 0.7.
struct batches {
    sequence_thresholds thresholds{ LITTLE };
    batch_info          batch;
    stats               counters;

    std::unique_ptr<batch_passes> passes = make_passes();

    batches() { thresholds.set(2, numbers(0.5, 0.5)); }

    void begin(const std::vector<int32_t> & sequences, bool can_repeat = true, std::vector<int8_t> outputs = {}) {
        outputs.resize(sequences.size(), 1);
        const std::vector<int32_t> positions(sequences.size(), 7);
        batch.begin(uint32_t(sequences.size()), sequences.data(), positions.data(), outputs.data());
        passes->begin(batch, thresholds, can_repeat);
    }

    // The first of two tokens to choose from has these probabilities.
    uint64_t judge(const std::vector<double> & probabilities) {
        std::vector<float> logits;
        for (const double p : probabilities) {
            logits.insert(logits.end(), { float(std::log(p)), float(std::log(1.0 - p)) });
        }
        return judge(logits.data());
    }

    // The number of tokens that are computed again. logits: of two tokens to choose from
    uint64_t judge(const float * logits) {
        const uint64_t before  = counters.of("tokens_repeated");
        const bool     repeats = passes->repeats(batch, thresholds, logits, 2, counters);
        const uint64_t n       = counters.of("tokens_repeated") - before;
        CHECK(repeats == (n > 0));
        return n;
    }

    bool is_high(int32_t sequence) const { return thresholds.of(sequence).all_high(); }
};

} // namespace

TEST_CASE("a token that is sure is kept, any other is computed again in high precision") {
    batches b;
    b.begin({ 0 });
    CHECK(b.batch.pass() == batch_pass::draft);
    CHECK_FALSE(b.is_high(0));
    CHECK(b.judge({ 0.75 }) == 0);
    CHECK(b.batch.pass() == batch_pass::draft);

    b.begin({ 0 });
    CHECK(b.judge({ 0.65 }) == 1);
    CHECK(b.batch.pass() == batch_pass::second);
    CHECK(b.is_high(0));

    b.begin({ 0 }); // the next token is a draft again
    CHECK(b.batch.pass() == batch_pass::draft);
    CHECK_FALSE(b.is_high(0));
}

TEST_CASE("the best of all tokens counts, and a probability that equals the confidence is not above it") {
    batches b;
    b.begin({ 0 });
    CHECK(b.judge({ 0.1 }) == 0); // the other one has 0.9
    b.thresholds.set(0, numbers(0.5, 0.5, 0.0, 0.5));
    b.begin({ 0 });
    CHECK(b.judge({ 0.5 }) == 1);
    b.thresholds.set(0, numbers(0.5, 0.5, 0.0, 1.0));
    b.begin({ 0 });
    const float certain[] = { 0.0f, -std::numeric_limits<float>::infinity() };
    CHECK(b.judge(certain) == 1);
}

TEST_CASE("logits that are not known, or no numbers, are unsure") {
    batches b;
    b.begin({ 0 });
    CHECK(b.judge(nullptr) == 1);
    b.begin({ 0 });
    const float broken[] = { 0.0f, std::numeric_limits<float>::quiet_NaN() };
    CHECK(b.judge(broken) == 1);
}

TEST_CASE("of several sequences those are raised that are unsure, and those without a confidence stay as they are") {
    batches b;
    b.begin({ 3, 0, 2, 1 });
    CHECK(b.batch.pass() == batch_pass::draft);
    CHECK(b.judge({ 0.9, 0.6, 0.6, 0.4 }) == 2);
    CHECK(b.batch.pass() == batch_pass::second);
    for (const auto & [sequence, is_high] :
         std::vector<std::pair<int, bool>>{ { 3, false }, { 0, true }, { 2, false }, { 1, true } }) {
        CHECK(b.is_high(sequence) == is_high);
    }
    b.begin({ 2 });
    CHECK(b.batch.pass() == batch_pass::only);
    CHECK_FALSE(b.is_high(2));
}

TEST_CASE("prompts, proposed tokens, and what cannot be judged or repeated are in high precision at once") {
    batches b;
    b.begin({ 0, 0, 0 });
    CHECK(b.batch.pass() == batch_pass::only);
    CHECK(b.is_high(0));
    b.begin({ 0, 1, 1, 2 });
    CHECK(b.batch.pass() == batch_pass::only);
    CHECK(b.is_high(0));
    CHECK_FALSE(b.is_high(2));
    b.begin({ 0, 1 }, true, { 0, 1 });
    CHECK(b.batch.pass() == batch_pass::only);
    CHECK(b.is_high(1));
    b.begin({ 0 }, false);
    CHECK(b.batch.pass() == batch_pass::only);
    CHECK(b.is_high(0));
}

TEST_CASE("the counter has its place in the table") {
    stats s;
    s.of("tokens_repeated") = 20;
    size_t i                = 0;
    while (std::string(hobbit_counter_at(i)->name) != "tokens_repeated") {
        i++;
    }
    CHECK(s.value(i) == 20);
}

TEST_CASE("a draft in high precision is no draft") {
    batches b;
    b.thresholds.set(0, numbers(1.0, 1.0, 0.0, 0.7));
    b.begin({ 0 });
    CHECK(b.batch.pass() == batch_pass::only);
}

TEST_CASE("it keeps what the draft did: selections are counted together, and known uses are not new") {
    batches             b;
    const layer_routing routing = { 1, 2, 2, { 4, 5, 5, 6 }, {} };
    layer_plan          plan;
    plan.precisions = { precision::high, precision::skip, precision::low, precision::high };
    step_counts counts;
    counts.selections = { 2, 1 };
    counts.skipped    = 1;
    b.begin({ 0, 1 });
    b.passes->keep(routing, plan, counts);
    b.passes->keep({ 0, 2, 2, { 0, 0, 0, 0 }, {} }, plan, counts);
    CHECK(b.judge({ 0.9, 0.9 }) == 0);
    CHECK(b.counters.selections[tier_id::high] == 4);
    CHECK(b.counters.selections[tier_id::low] == 2);
    CHECK(b.counters.selections_skipped == 2);

    const layer_routing again = { 1, 2, 2, { 4, 5, 6, 5 }, {} };
    CHECK_FALSE(b.passes->is_new(again, 0, precision::high));
    CHECK(b.passes->is_new(again, 1, precision::high)); // skipped, though the other token used it
    CHECK_FALSE(b.passes->is_new(again, 2, precision::high));
    CHECK(b.passes->is_new(again, 3, precision::high)); // was low
    CHECK_FALSE(b.passes->is_new(again, 3, precision::low));
    CHECK(b.passes->is_new({ 1, 2, 2, { 7, 5, 6, 5 }, {} }, 0, precision::low));

    b.begin({ 0 });
    CHECK(b.judge({ 0.9 }) == 0);
    CHECK(b.counters.selections_skipped == 2); // nothing more
}
