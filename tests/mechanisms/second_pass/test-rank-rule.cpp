// SPDX-License-Identifier: MIT
#include "engine/settings.h"
#include "fixtures/given-settings.h"
#include "fixtures/numbers.h"
#include "plan/precision-rule.h"

#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

TEST_CASE("the rule \"rank\" counts experts: the first half, and the others low or skipped") {
    const std::vector<float> weights = { 0.1f, 0.4f, 0.2f, 0.3f }; // ranks 3, 0, 2, 1
    const layer_routing      routing = { 0, 1, 4, { 0, 1, 2, 3 }, weights };
    const residency          none    = [](expert_id, tier_id) { return false; };
    const auto               decide  = [&](const layer_routing & r, std::pair<double, double> t) {
        const std::vector<rule_numbers> thresholds(size_t(r.n_tokens), numbers(t.first, t.second));
        std::string                     letters;
        for (const precision p : registered_rule::make({ "rank" })->decide({ r, thresholds, none, true })) {
            letters += p == precision::high ? 'H' : p == precision::low ? 'L' : '-';
        }
        return letters;
    };
    CHECK(decide(routing, { 0.5, 0.5 }) == "-H-H");
    CHECK(decide(routing, { 0.5, 1.0 }) == "LHLH");
    CHECK(decide(routing, { 0.25, 0.75 }) == "-HLL");
    CHECK(decide(routing, { 0.0, 0.0 }) == "-H--"); // the first expert is always high
    CHECK(decide(routing, { 1.0, 1.0 }) == "HHHH");
    CHECK(decide({ 0, 2, 2, { 0, 1, 2, 3 }, { 1, 2, 2, 1 } }, { 0.5, 0.5 }) == "-HH-");
    CHECK(decide({ 0, 1, 3, { 0, 1, 2 }, { 3, 2, 1 } }, { 0.5, 0.5 }) == "HH-"); // the middle one has 0.5
    CHECK(decide({ 0, 1, 2, { 0, 1 }, {} }, { 0.0, 0.0 }) == "HH");
    CHECK(decide({ 0, 1, 2, { 0, 1 }, { 0, 0 } }, { 0.0, 0.0 }) == "HH");
}

TEST_CASE("the rule \"rank\" is MoBiLE's little model unless the caller gives thresholds") {
    CHECK(applied({ text("hobbit.rule", "rank") }).number("hobbit.t1") == 0.5);
    CHECK(applied({ text("hobbit.rule", "rank") }).number("hobbit.t2") == 0.5);
    CHECK(applied({ text("hobbit.rule", "rank"), number("hobbit.t1", 0.5) }).number("hobbit.t2") == 1.0);
    settings s = applied({ text("hobbit.rule", "rank") });
    CHECK(s.apply_stored({ { "hobbit.t1", 0.4 }, { "hobbit.t2", 0.9 }, { "hobbit.low_share", 0.7 } }).ok());
    CHECK(s.number("hobbit.t1") == 0.5);
    CHECK(s.number("hobbit.t2") == 0.5);
    CHECK(s.bounds().low_share == 0.0); // no expert is low
}

TEST_CASE("a confidence lies between 0 and 1, is off by default, and is live") {
    CHECK(applied({}).number("hobbit.confidence") == 0.0);
    CHECK(refused({ number("hobbit.confidence", 1.5) }).find("hobbit.confidence is 1.5: it must lie") == 0);
    settings s = applied({ number("hobbit.confidence", 0.7) });
    CHECK(s.number("hobbit.confidence") == 0.7);
    CHECK(changed(s, { number("hobbit.t1", 0.5), number("hobbit.confidence", 0.3) }) == "");
    CHECK(s.number("hobbit.confidence") == 0.3);
    CHECK(s.number("hobbit.confidence") == 0.3);
    CHECK(changed(s, { number("hobbit.confidence", -0.1) }).find("hobbit.confidence is -0.1") == 0);
}
