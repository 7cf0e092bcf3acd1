// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include "fixtures/given-settings.h"

#include <array>
#include <cmath>
#include <doctest/doctest.h>
#include <string>
#include <vector>

using namespace hobbit;

//
// settings stored in the model file
//

TEST_CASE("stored settings fill in what was not given") {
    settings s = applied({});
    CHECK(s.apply_stored({ { "hobbit.t1", 0.6 }, { "hobbit.t2", 0.9 }, { "hobbit.low_share", 0.3 } }).ok());
    CHECK(s.number("hobbit.t1") == 0.6);
    CHECK(s.number("hobbit.t2") == 0.9);
    CHECK(s.bounds().low_share == 0.3);
    CHECK_FALSE(s.asked()); // the file does not decide whether there is a cache
}

TEST_CASE("stored settings lose against given ones") {
    settings s = applied({ number("hobbit.t1", 0.5), number("hobbit.t2", 0.7), number("hobbit.low_share", 0.1) });
    CHECK(s.apply_stored({ { "hobbit.t1", 0.6 }, { "hobbit.t2", 0.9 }, { "hobbit.low_share", 0.3 } }).ok());
    CHECK(s.number("hobbit.t1") == 0.5);
    CHECK(s.number("hobbit.t2") == 0.7);
    CHECK(s.bounds().low_share == 0.1);
}

TEST_CASE("each rule has the division of the pools that was fitted to it") {
    const stored_settings stored = { { "hobbit.rule", std::string("price") },
                                     { "hobbit.price", 0.1 },
                                     { "hobbit.t1", 0.6 },
                                     { "hobbit.low_share", 0.3 },
                                     { "hobbit.gate.low_share", 0.2 },
                                     { "hobbit.price.low_share", 0.4 } };
    const auto            share  = [&](std::vector<hobbit_setting> given) {
        settings s = applied(given);
        CHECK(s.apply_stored(stored).ok());
        return s.bounds().low_share;
    };
    CHECK(share({}) == 0.4);
    CHECK(share({ text("hobbit.rule", "gate") }) == 0.2);
    CHECK(share({ number("hobbit.t1", 0.5) }) < 0); // nothing was fitted to these numbers
    CHECK(share({ number("hobbit.price", 0.5) }) < 0);
    CHECK(share({ text("hobbit.rule", "edgemoe") }) < 0); // nothing was fitted to it
    CHECK(share({ text("hobbit.rule", "gate"), number("hobbit.low_share", 0.1) }) == 0.1);
    settings s = applied({ text("hobbit.rule", "gate") });
    CHECK_FALSE(s.apply_stored({ { "hobbit.gate.low_share", 2.0 } }).ok());
}

TEST_CASE("a division of the pools that names no rule belongs to the stored one") {
    const auto share = [](const std::vector<hobbit_setting> & given, const char * rule) {
        stored_settings stored = { { "hobbit.low_share", 0.3 } };
        if (rule) {
            stored.emplace_back("hobbit.rule", std::string(rule));
        }
        settings s = applied(given);
        CHECK(s.apply_stored(stored).ok());
        return s.bounds().low_share;
    };
    CHECK(share({}, "price") == 0.3);
    CHECK(share({ number("hobbit.price", 0.5) }, "price") < 0);
    CHECK(share({ text("hobbit.rule", "gate") }, "price") < 0);
    CHECK(share({ number("hobbit.t1", 0.6), number("hobbit.t2", 0.9) }, "price") < 0);
    CHECK(share({ number("hobbit.t1", 0.6) }, "gate") < 0);
    CHECK(share({ number("hobbit.price", 0.5) }, "gate") < 0);
    CHECK(share({ text("hobbit.rule", "gate") }, nullptr) == 0.3);
    CHECK(share({ number("hobbit.price", 0.5) }, nullptr) < 0);
}

TEST_CASE("thresholds belong together: one given, neither is taken from the file") {
    settings s = applied({ number("hobbit.t1", 0.95) });
    CHECK(s.apply_stored({ { "hobbit.t1", 0.6 }, { "hobbit.t2", 0.9 } }).ok());
    CHECK(s.number("hobbit.t1") == 0.95);
    CHECK(s.number("hobbit.t2") == 1.0);
}

TEST_CASE("stored values out of range are refused") {
    const stored_settings cases[] = {
        { { "hobbit.t1", 0.9 }, { "hobbit.t2", 0.5 } },
        { { "hobbit.t2", 1.5 } },
        { { "hobbit.t1", -0.5 } },
        { { "hobbit.t1", std::nan("") } },
        { { "hobbit.t2", std::nan("") } },
        { { "hobbit.low_share", 2.0 } },
        { { "hobbit.low_share", std::nan("") } },
        { { "hobbit.w_lru", 0.9 } },
        { { "hobbit.prefetch", 5.0 } },
        { { "hobbit.prefetch", -1.0 } },
        { { "hobbit.prefetch", std::nan("") } },
    };
    for (const auto & stored : cases) {
        CAPTURE(stored[0].first);
        CAPTURE(std::get<double>(stored[0].second));
        settings s = applied({});
        CHECK_FALSE(s.apply_stored(stored).ok());
    }
}

TEST_CASE("only what calibration finds may be stored") {
    settings s = applied({});
    CHECK_FALSE(s.apply_stored({ { "hobbit.memory", 1e9 } }).ok());
    for (const std::string & key : settings::stored_keys()) {
        CHECK(key != "hobbit.memory");
    }
}

//
// quality
//

static settings with_quality(const char * word, const stored_settings & stored, double low_bits) {
    settings s = word ? applied({ text("hobbit.quality", word) }) : applied({});
    CHECK(s.apply_stored(stored).ok());
    const status result = s.resolve_quality(low_bits);
    CHECK_MESSAGE(result.ok(), result.message());
    return s;
}

static const stored_settings PRICED = {
    { "hobbit.rule", std::string("price") }, { "hobbit.price", 0.1 }, { "hobbit.t1", 0.5 }, { "hobbit.fast.price", 0.3 }
};

TEST_CASE("a quality stands for the numbers that a calibration found") {
    CHECK(with_quality(nullptr, PRICED, 2.6).number("hobbit.price") == 0.1);
    CHECK(with_quality("lossless", PRICED, 2.6).thresholds().all_high());
    CHECK(with_quality("lossless", PRICED, 2.6).bounds().low_demand == 0.0);
    CHECK(with_quality("small-loss", PRICED, 2.6).number("hobbit.price") == 0.1);
    CHECK(with_quality("fast", PRICED, 2.6).number("hobbit.price") == 0.3);
    CHECK(with_quality("fast", PRICED, 2.6).rule() == "price");
    CHECK(with_quality("fast", { PRICED.begin(), PRICED.end() - 1 }, 2.6).number("hobbit.price") == 0.1);
    const settings gate = with_quality("fast", { { "hobbit.t1", 0.5 }, { "hobbit.fast.t1", 0.2 } }, 2.6);
    CHECK(gate.number("hobbit.t1") == 0.2);
    CHECK(gate.number("hobbit.t2") == 1.0);
    CHECK_FALSE(gate.asked());
}

TEST_CASE("without a calibration the type of the low tier decides, and a note says so") {
    const settings coarse = with_quality("small-loss", {}, 2.6);
    const settings fine   = with_quality("small-loss", {}, 4.5);
    CHECK(coarse.number("hobbit.t1") == fine.number("hobbit.t1"));
    CHECK(coarse.number("hobbit.t2") == 1.0);
    CHECK(with_quality("fast", {}, 4.5).number("hobbit.t1") < fine.number("hobbit.t1"));
    CHECK(with_quality("fast", {}, 4.5).number("hobbit.t2") == 1.0);
    CHECK(with_quality("fast", {}, 2.6).number("hobbit.t2") < 1.0);
    const settings of_file = with_quality("small-loss", { { "hobbit.t1", 0.45 }, { "hobbit.t2", 0.9 } }, 4.5);
    CHECK(of_file.at("hobbit.quality").note == "stored in the file: t1 0.45, t2 0.9");
    CHECK(coarse.at("hobbit.quality").note == "not calibrated: t1 0.6, t2 1 for a low tier of 2.6 bits");
    CHECK(with_quality("fast", {}, 0.0).thresholds().all_high());
    CHECK(with_quality("fast", {}, 0.0).at("hobbit.quality").note.find("no low tier") == 0);
    CHECK_FALSE(with_quality(nullptr, {}, 2.6).at("hobbit.quality").has_value);
}

TEST_CASE("a quality beside the numbers that it stands for is refused") {
    CHECK(refused({ text("hobbit.quality", "fast"), number("hobbit.t1", 0.5) }) ==
          "hobbit.quality chooses the rule and its numbers, and hobbit.t1 is given beside it: leave one of them out");
    CHECK(refused({ number("hobbit.confidence", 0.5), text("hobbit.quality", "fast") }).find("hobbit.confidence") !=
          std::string::npos);
    CHECK(refused({ text("hobbit.quality", "slow") }).find("choose one of lossless small-loss fast") !=
          std::string::npos);
    settings s = applied({ text("hobbit.quality", "fast") });
    CHECK(s.apply_stored({ { "hobbit.fast.t1", 0.9 }, { "hobbit.fast.t2", 0.5 } }).ok());
    CHECK_FALSE(s.resolve_quality(2.6).ok());
}

TEST_CASE("the quality is live, and other numbers take its place") {
    settings s = with_quality("small-loss", PRICED, 2.6);
    CHECK(changed(s, { text("hobbit.quality", "fast") }) == "");
    CHECK(s.number("hobbit.price") == 0.3);
    CHECK(changed(s, { number("hobbit.price", 0.2) }) == "");
    CHECK(s.text("hobbit.quality").empty());
    CHECK(changed(s, { text("hobbit.quality", "lossless") }) == "");
    CHECK(s.thresholds().all_high());
    CHECK(s.text("hobbit.quality") == "lossless");
    CHECK(changed(settings(s), { text("hobbit.quality", "fast"), number("hobbit.price", 1.0) }).find("beside it") !=
          std::string::npos);
    // opened with numbers of its own
    settings own = applied({ number("hobbit.t1", 0.9) });
    CHECK(own.apply_stored({}).ok());
    CHECK(own.resolve_quality(2.6).ok());
    CHECK(changed(own, { text("hobbit.quality", "fast") }) == "");
    CHECK(own.number("hobbit.t2") == 0.9);
}

//
// policy
//

TEST_CASE("the policy and its weights, given and stored") {
    settings s = applied({ text("hobbit.policy", "lfu") });
    CHECK(s.policy() == "lfu");
    CHECK(s.apply_stored({ { "hobbit.policy", "lru" } }).ok());
    CHECK(s.policy() == "lfu");

    settings stored = applied({});
    CHECK(stored
              .apply_stored({ { "hobbit.w_lru", 0.1 },
                              { "hobbit.w_lfu", 0.2 },
                              { "hobbit.w_lhu", 0.3 },
                              { "hobbit.w_fld", 0.4 },
                              { "hobbit.policy", "hobbit" } })
              .ok());
    CHECK(stored.policy() == "hobbit");
    CHECK(stored.weights() == std::array<double, 4>{ 0.1, 0.2, 0.3, 0.4 });

    settings one = applied({ number("hobbit.w_lfu", 1.0) }); // the others are 0 then
    CHECK(one.policy() == "hobbit");
    CHECK(one.weights() == std::array<double, 4>{ 0.0, 1.0, 0.0, 0.0 });
    CHECK(one.apply_stored({ { "hobbit.w_lru", 1.0 }, { "hobbit.policy", "lru" } })
              .ok()); // weights given: none are taken from the file
    CHECK(one.weights() == std::array<double, 4>{ 0.0, 1.0, 0.0, 0.0 });
}

TEST_CASE("policies and weights that make no sense are refused") {
    CHECK(refused({ text("hobbit.policy", "best") }).find("hobbit.policy is 'best': choose one of ") == 0);
    CHECK(refused({ text("hobbit.policy", "best") }).find(" lru ") != std::string::npos);
    CHECK(refused({ number("hobbit.w_lru", 0.5), number("hobbit.w_lfu", 0.4) }).find("sum to 0.9") !=
          std::string::npos);
    CHECK(refused({ number("hobbit.w_lru", 1.5), number("hobbit.w_lfu", -0.5) })
              .find("hobbit.w_lru is 1.5: it must lie") == 0);
    CHECK(refused({ text("hobbit.policy", "lru"), number("hobbit.w_lru", 1) }).find("belong to the policy 'hobbit'") !=
          std::string::npos);
    CHECK(refused({ text("hobbit.rule", "best") }).find("hobbit.rule is 'best': choose one of edgemoe gate price") ==
          0);
    CHECK(refused({ number("hobbit.prefetch", 5) }).find("hobbit.prefetch is 5: it must lie between 0 and 4") == 0);
    CHECK(refused({ number("hobbit.policy", 1) }) == "hobbit.policy takes a text");
}
