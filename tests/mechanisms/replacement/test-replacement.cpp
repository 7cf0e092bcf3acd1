// SPDX-License-Identifier: MIT
#include "fixtures/numbers.h"
#include "mechanisms/replacement/replacement-hooks.h"

#include "plan/layer-plan.h"

#include <doctest/doctest.h>
#include <set>
#include <vector>

using namespace hobbit;

namespace {

using experts = std::vector<int32_t>;

// Tokens of two experts each, of six in layer 3.
struct layer {
    layer_routing                   routing;
    std::vector<int32_t>            ranking;
    std::set<uint32_t>              high;
    std::set<uint32_t>              low         = {};
    std::vector<rule_numbers>       all         = std::vector<rule_numbers>(size_t(routing.n_tokens));
    bool                            has_low     = true;
    size_t                          n_replaced  = 0;
    std::unique_ptr<precision_rule> rule        = registered_rule::make({ "gate" });
    const residency                 is_resident = [this](expert_id id, tier_id tier) {
        return (tier == tier_id::high ? high : low).count(id.expert) > 0;
    };

    layer_plan plan(bool strict = false) {
        n_replaced        = 0;
        const auto adjust = [&](const rule_input & in, std::vector<precision> & precisions, experts & served) {
            served = replace_missing(in, ranking, precisions);
            for (size_t i = 0; i < served.size(); i++) {
                n_replaced += served[i] != routing.experts[i];
            }
        };
        return plan_layer(*rule, { routing, all, is_resident, has_low }, strict, adjust);
    }

    size_t replaced(bool strict = false) {
        plan(strict);
        return n_replaced;
    }

    experts served() {
        experts by(routing.experts.size(), -1);
        for (const planned_use & use : plan().uses) {
            for (const int32_t i : use.selections) {
                by[size_t(i)] = int32_t(use.id.expert);
            }
        }
        return by;
    }
};

// Chooses experts 5 and 2; the next best are 0, 4, 1, 3.
layer one_token(std::set<uint32_t> high, std::set<uint32_t> low = {}) {
    return { { 3, 1, 2, { 5, 2 }, { 0.75f, 0.25f } }, { 5, 2, 0, 4, 1, 3 }, std::move(high), std::move(low) };
}

} // namespace

TEST_CASE("of two missing experts the best is fetched, and the best resident one replaces the other") {
    CHECK(one_token({ 1, 4 }).served() == experts{ 5, 4 });
    CHECK(one_token({ 1, 4 }).replaced() == 1);
    CHECK(one_token({}).served() == experts{ 5, 2 }); // no expert is resident
}

TEST_CASE("one missing expert is fetched, whichever it is") {
    CHECK(one_token({ 0, 5 }).served() == experts{ 5, 2 });
    CHECK(one_token({ 0, 2 }).served() == experts{ 5, 2 });
    CHECK(one_token({ 0, 2, 5 }).replaced() == 0);
}

TEST_CASE("a resident low version replaces too, unless there is no pool for it") {
    layer both = one_token({ 1 }, { 0 });
    CHECK(both.replaced() == 1);
    CHECK(both.plan().precisions == std::vector<precision>{ precision::high, precision::low });
    layer without   = one_token({ 1 }, { 0 });
    without.has_low = false;
    CHECK(without.served() == experts{ 5, 1 });
}

TEST_CASE("what another token has fetched is not replaced, and a skipped expert is not missing") {
    layer two = { { 3, 2, 2, { 5, 2, 2, 1 }, { 0.7f, 0.3f, 0.7f, 0.3f } },
                  { 5, 2, 0, 4, 1, 3, 2, 1, 4, 0, 3, 5 },
                  { 0, 4 } };
    CHECK(two.served() == experts{ 5, 2, 2, 4 });
    layer skipping = one_token({ 0 });
    skipping.all   = { numbers(0.5, 0.5) };
    CHECK(skipping.served() == experts{ 5, -1 });
    CHECK(skipping.replaced() == 0);
}

TEST_CASE("nothing is replaced where quality is measured") {
    CHECK(one_token({ 1, 4 }).replaced(/* strict = */ true) == 0);
}
