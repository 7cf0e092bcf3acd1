// SPDX-License-Identifier: MIT
#include "fixtures/numbers.h"
#include "plan/precision-rule.h"

#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

using namespace hobbit;

static constexpr float NEVER = std::numeric_limits<float>::infinity();
static constexpr float NAN_F = std::numeric_limits<float>::quiet_NaN();

namespace {

// Tokens of layer 1, whose experts are numbered from 0, and nothing is resident.
struct priced {
    std::vector<float> low       = { 0.0f, 1.0f };
    std::vector<float> skip      = { 0.0f, 4.0f };
    double             low_bytes = 0.25;
    residency          resident  = [](expert_id, tier_id) { return false; };
    bool               has_low   = true;
    const char *       name      = "price";

    // One letter per expert: H, L or - for skipped.
    std::string letters(const std::vector<float> & weights, double price, size_t n_tokens = 1) const {
        const size_t    n_used = weights.size() / n_tokens;
        precision_costs costs;
        const status    s = costs.set(low, skip, 2, uint32_t(n_used));
        CHECK_MESSAGE(s.ok(), s.message());
        layer_routing routing = { 1, int64_t(n_tokens), int64_t(n_used), {}, weights };
        for (size_t i = 0; i < weights.size(); i++) {
            routing.experts.push_back(int32_t(i % n_used));
        }
        const std::vector<rule_numbers> thresholds(n_tokens, numbers(1.0, 1.0, price));
        const auto                      rule = registered_rule::make({ name, &costs, low_bytes });
        std::string                     letters;
        for (const precision p : rule->decide({ routing, thresholds, resident, has_low })) {
            letters += p == precision::high ? 'H' : p == precision::low ? 'L' : '-';
        }
        return letters;
    }
};

} // namespace

// Squares of the weights 0.5, 0.3, 0.2 are 0.25, 0.09, 0.04. Low saves 0.75 bytes for a loss of w^2, skipping saves 1
// for 4 w^2. The price at which low beats high is w^2 / 0.75: 0.333, 0.12, 0.0533. Skipping beats low where 4 w^2 < w^2
// + price / 4, from a price of 12 w^2: 3, 1.08, 0.48.
TEST_CASE("each use gets the precision with the smallest loss and price") {
    const std::vector<float> weights = { 0.5f, 0.3f, 0.2f };
    const priced             p;
    CHECK(p.letters(weights, 0.0) == "HHH");
    CHECK(p.letters(weights, 0.05) == "HHH");
    CHECK(p.letters(weights, 0.06) == "HHL");
    CHECK(p.letters(weights, 0.11) == "HHL");
    CHECK(p.letters(weights, 0.13) == "HLL");
    CHECK(p.letters(weights, 0.32) == "HLL");
    CHECK(p.letters(weights, 0.34) == "LLL");
    CHECK(p.letters(weights, 0.47) == "LLL");
    CHECK(p.letters(weights, 0.49) == "LL-");
    CHECK(p.letters(weights, 1.1) == "L--");
    CHECK(p.letters(weights, 1e9) == "L--"); // the first expert is never skipped
}

TEST_CASE("each token is decided by its own weights") {
    CHECK(priced().letters({ 0.5f, 0.3f, 0.2f, 0.2f, 0.3f, 0.5f }, 0.06, 2) == "HHLLHH");
}

TEST_CASE("weights are normalised, and the first expert is the one with the largest weight") {
    const priced p;
    CHECK(p.letters({ 2.0f, 5.0f, 3.0f }, 0.11) == "LHH");
    CHECK(p.letters({ 2.0f, 5.0f, 3.0f }, 1e9) == "-L-");
    CHECK(p.letters({ 1.0f, 1.0f }, 1e9) == "L-"); // the first one among equals
}

TEST_CASE("weights that rank nothing, or are unknown, make everything high") {
    const priced p;
    CHECK(p.letters({ 0.0f, 0.0f }, 1e9) == "HH");
    CHECK(p.letters({ NAN_F, 0.5f }, 1e9) == "HH");
    CHECK(p.letters({ NEVER, 0.5f }, 1e9) == "HH");
    precision_costs costs;
    REQUIRE(costs.set({ 1, 1 }, { 1, 1 }, 2, 2).ok());
    const layer_routing             routing    = { 0, 1, 2, { 0, 1 }, {} };
    const std::vector<rule_numbers> thresholds = { numbers(1.0, 1.0, 1e9) };
    CHECK(registered_rule::make({ "price", &costs, 0.25 })->decide({ routing, thresholds, priced().resident, true }) ==
          std::vector<precision>(2, precision::high));
}

TEST_CASE("equal choices take the better precision") {
    priced p;
    p.low  = { 0.0f, 3.0f }; // 3 * 0.25 = 0.75 * price 1
    p.skip = { 0.0f, NEVER };
    CHECK(p.letters({ 0.5f, 0.5f }, 1.0) == "HH");
    CHECK(p.letters({ 0.5f, 0.5f }, 1.001) == "LL");
}

TEST_CASE("what is resident costs no bytes") {
    const std::vector<float> weights = { 0.5f, 0.3f, 0.2f };
    priced                   p;
    p.resident = [](expert_id id, tier_id tier) { return id.expert == 2 && tier == tier_id::high; };
    CHECK(p.letters(weights, 1e9) == "L-H");
    p.resident = [](expert_id id, tier_id tier) { return id.expert == 1 && tier == tier_id::low; };
    CHECK(p.letters(weights, 0.1) == "HLL"); // 0.09 for the resident version, 0.1 for loading the high one
    CHECK(p.letters(weights, 0.08) == "HHL");
    CHECK(p.letters(weights, 1e9) == "LL-"); // skipping it saves nothing
}

TEST_CASE("without a low pool an expert is high or skipped") {
    priced p;
    p.has_low = false;
    CHECK(p.letters({ 0.5f, 0.3f, 0.2f }, 0.15) == "HHH");
    CHECK(p.letters({ 0.5f, 0.3f, 0.2f }, 0.17) == "HH-"); // 4 * 0.04 = 0.16
}

TEST_CASE("an infinite cost forbids a choice, even for a weight of 0") {
    priced p;
    p.low  = { 0.0f, NEVER };
    p.skip = { 0.0f, NEVER };
    CHECK(p.letters({ 1.0f, 0.0f }, 1e9) == "HH");
}

TEST_CASE("the rule edgemoe gives an expert the same precision for all tokens, and skips none") {
    priced p;
    p.name = "edgemoe";
    p.low  = { 0, 0, 0, 0.7f, 0.8f, 0.2f };
    p.skip = std::vector<float>(6, 0.0f);
    CHECK(p.letters({ 0.5f, 0.3f, 0.2f }, 1.0) == "LHL"); // low saves 0.75
    CHECK(p.letters({ 0.1f, 0.1f, 0.8f }, 1.0) == "LHL");
    CHECK(p.letters({ 0.5f, 0.3f, 0.2f }, 0.5) == "HHL");
    CHECK(registered_rule::traits("edgemoe").needs_costs);
    CHECK_FALSE(registered_rule::traits("gate").needs_costs);
    CHECK_FALSE(registered_rule::traits("best").needs_costs);
}

TEST_CASE("costs may be given by expert") {
    priced p;
    p.low  = { 0, 0, 0, 0, 100.0f, 0 };
    p.skip = std::vector<float>(6, NEVER);
    CHECK(p.letters({ 0.4f, 0.3f, 0.3f }, 1.0) == "LHL");
}

TEST_CASE("costs of a wrong number, negative or NaN are refused") {
    precision_costs costs;
    CHECK(costs.empty());
    CHECK(costs.set({ 1, 1 }, { 1 }, 2, 3).message() ==
          "there are 2 costs of low precision and 1 of skipping: give one of each for every layer (2) or for every "
          "expert (6)");
    CHECK_FALSE(costs.set({ 1, 1, 1 }, { 1, 1, 1 }, 2, 3).ok());
    CHECK_FALSE(costs.set({}, {}, 2, 3).ok());
    CHECK(costs.set({ 1, -1 }, { 1, 1 }, 2, 3).message().find("negative or NaN") != std::string::npos);
    CHECK(costs.set({ 1, 1 }, { 1, NAN_F }, 2, 3).message().find("negative or NaN") != std::string::npos);
    CHECK(costs.empty());
    CHECK(costs.set({ 1, 1 }, { 1, NEVER }, 2, 3).ok());
    CHECK_FALSE(costs.empty());
}
