// SPDX-License-Identifier: MIT
#include "fixtures/numbers.h"
#include "plan/precision-rule.h"

#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

using namespace hobbit;

// One letter per expert: H, L or - for skipped.
static std::string score(const std::vector<float> & weights, double t1, double t2) {
    const layer_routing routing = { 0, 1, int64_t(weights.size()), std::vector<int32_t>(weights.size()), weights };
    const std::vector<rule_numbers> thresholds = { numbers(t1, t2) };
    std::string                     letters;
    for (const precision p : registered_rule::make({ "gate" })->decide({ routing, thresholds, {}, true })) {
        letters += p == precision::high ? 'H' : p == precision::low ? 'L' : '-';
    }
    return letters;
}

TEST_CASE("scores are the weights ranked before, compared with both thresholds") {
    // scores 0, 0.5, 0.75, 0.875
    const std::vector<float> weights = { 0.5f, 0.25f, 0.125f, 0.125f };
    CHECK(score(weights, 0.6, 0.8) == "HHL-");
    CHECK(score(weights, 0.1, 0.2) == "H---");
    CHECK(score(weights, 0.8, 0.9) == "HHHL");
}

TEST_CASE("a score that equals a threshold keeps the better precision") {
    // scores 0, 0.5, 0.75, 0.875, all exact in binary
    CHECK(score({ 0.5f, 0.25f, 0.125f, 0.125f }, 0.5, 0.75) == "HHL-");
}

TEST_CASE("the first expert is high whatever the thresholds") {
    CHECK(score({ 0.5f, 0.5f }, 0.0, 0.0) == "H-");
    CHECK(score({ 1.0f }, 0.0, 0.0) == "H");
}

TEST_CASE("t1 = 0 leaves only the first expert high") {
    CHECK(score({ 0.4f, 0.3f, 0.2f, 0.1f }, 0.0, 1.0) == "HLLL");
}

TEST_CASE("t1 = t2 = 1 makes everything high, even where rounding lifts a score above 1") {
    CHECK(score({ 0.4f, 0.3f, 0.2f, 0.1f }, 1.0, 1.0) == "HHHH");
    CHECK(score(std::vector<float>(64, 0.1f), 1.0, 1.0) == std::string(64, 'H'));
}

TEST_CASE("t2 = 1 skips nothing, even where rounding lifts a score above 1") {
    // a last weight of 0 has the score 1 to within rounding
    std::vector<float> weights(64, 0.1f);
    weights.back() = 0.0f;
    CHECK(score(weights, 0.0, 1.0) == "H" + std::string(63, 'L'));
}

TEST_CASE("experts are ranked by weight, not by position") {
    // by weight: 0.5 (score 0), 0.3 (0.5), 0.2 (0.8)
    CHECK(score({ 0.2f, 0.5f, 0.3f }, 0.6, 0.7) == "-HH");
    CHECK(score({ 0.3f, 0.2f, 0.5f }, 0.4, 0.7) == "L-H");
}

TEST_CASE("weights that do not sum to 1 are normalised") {
    // sigmoid weights 2, 1, 1: scores 0, 0.5, 0.75
    CHECK(score({ 2.0f, 1.0f, 1.0f }, 0.6, 0.7) == "HH-");
    CHECK(score({ 0.02f, 0.01f, 0.01f }, 0.6, 0.7) == "HH-");
}

TEST_CASE("equal weights keep their order") {
    // scores 0, 0.25, 0.5, 0.75 from left to right
    CHECK(score({ 0.25f, 0.25f, 0.25f, 0.25f }, 0.25, 0.5) == "HHL-");
}

TEST_CASE("weights that rank nothing make everything high") {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float inf = std::numeric_limits<float>::infinity();
    CHECK(score({ nan, 0.5f, 0.5f }, 0.0, 0.0) == "HHH");
    CHECK(score({ inf, 0.5f }, 0.0, 0.0) == "HH");
    CHECK(score({ 0.0f, 0.0f, 0.0f }, 0.0, 0.0) == "HHH");
    CHECK(score({ -1.0f, 0.5f }, 0.0, 0.0) == "HH");
}

TEST_CASE("a threshold t2 of 1 skips no score above 1") {
    CHECK(of_score(1.0 + 1e-9, numbers(0.5, 1.0)) == precision::low);
    CHECK(of_score(1.0 + 1e-9, numbers(0.5, 0.999)) == precision::skip);
}

TEST_CASE("some rules take a price, and the others two thresholds") {
    for (const std::string & name : registered_rule::names()) {
        CAPTURE(name);
        CHECK(registered_rule::traits(name).needs_costs == (name == "price" || name == "edgemoe"));
    }
    CHECK_FALSE(registered_rule::traits("none").needs_costs);
}

TEST_CASE("a rule is made by its name") {
    for (const std::string & name : registered_rule::names()) {
        CHECK(registered_rule::make({ name }));
    }
    CHECK_FALSE(registered_rule::make({ "best" }));
}

TEST_CASE("without the router's weights the rule \"gate\" gives high precision") {
    const layer_routing             routing    = { 0, 2, 2, { 1, 2, 3, 4 }, {} };
    const std::vector<rule_numbers> thresholds = { numbers(0.0, 0.0), numbers(0.0, 0.0) };
    const residency                 none       = [](expert_id, tier_id) { return false; };
    CHECK(registered_rule::make({ "gate" })->decide({ routing, thresholds, none, true }) ==
          std::vector<precision>(4, precision::high));
}
