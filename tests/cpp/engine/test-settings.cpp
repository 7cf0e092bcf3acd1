// SPDX-License-Identifier: MIT
#include "engine/settings.h"

#include "fixtures/given-settings.h"
#include "policy/cache-policy.h"
#include "predict/predictor.h"

#include <cmath>
#include <cstdlib>
#include <doctest/doctest.h>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace hobbit;

TEST_CASE("nothing given: no cache asked for, everything high, sizes computed") {
    const settings s = applied({});
    CHECK_FALSE(s.asked());
    CHECK_FALSE(s.flag("hobbit.enable"));
    CHECK(s.number("hobbit.t1") == 1.0);
    CHECK(s.number("hobbit.t2") == 1.0);
    CHECK(s.memory() == 0);
    CHECK(s.pools() == 0);
    CHECK(s.bounds().low_share < 0);
    CHECK(s.count("hobbit.io_threads") == 4);
    CHECK(s.text("hobbit.sidecar").empty());
}

TEST_CASE("every key reaches its setting") {
    const settings s = applied({
        number("hobbit.enable", true),
        number("hobbit.memory", 3000000000),
        number("hobbit.low_share", 0.25),
        number("hobbit.t1", 0.6),
        number("hobbit.t2", 0.9),
        number("hobbit.io_threads", 7),
        text("hobbit.sidecar", "/models/x.hobbit.gguf"),
        text("hobbit.device", "Vulkan0"),
        number("hobbit.device_memory", 3000000000),
    });
    CHECK(s.flag("hobbit.enable"));
    CHECK(s.memory() == 3000000000);
    CHECK(applied({ number("hobbit.pools", 2000000000) }).pools() == 2000000000);
    CHECK(s.bounds().low_share == 0.25);
    CHECK(s.number("hobbit.t1") == 0.6);
    CHECK(s.number("hobbit.t2") == 0.9);
    CHECK(s.count("hobbit.io_threads") == 7);
    CHECK(s.text("hobbit.sidecar") == "/models/x.hobbit.gguf");
    CHECK(s.device() == "Vulkan0");
    CHECK(s.count("hobbit.device_memory") == 3000000000);
}

TEST_CASE("a size, a threshold, a sidecar or the switch asks for the cache; the rest does not") {
    CHECK(applied({ number("hobbit.enable", true) }).asked());
    CHECK(applied({ number("hobbit.memory", 1) }).asked());
    CHECK(applied({ number("hobbit.memory", 0) }).asked()); // compute the size, but do have a cache
    CHECK(applied({ number("hobbit.pools", 1) }).asked());
    CHECK(applied({ number("hobbit.t1", 0.5) }).asked());
    CHECK(applied({ number("hobbit.t2", 0.9) }).asked());
    CHECK(applied({ text("hobbit.sidecar", "x") }).asked());
    CHECK(applied({ text("hobbit.device", "CPU") }).asked());
    CHECK(applied({ text("hobbit.trace", "x") }).asked());
    CHECK(applied({ text("hobbit.timeline", "x") }).asked());
    CHECK(applied({ text("hobbit.mode", "auto") }).asked());
    CHECK(applied({ text("hobbit.placement", "cache") }).asked());
    CHECK(applied({ number("hobbit.device_memory", 0) }).asked());

    CHECK_FALSE(applied({ number("hobbit.enable", false) }).asked());
    CHECK_FALSE(applied({ text("hobbit.placement", "measured") }).asked());
    CHECK_FALSE(applied({ number("hobbit.low_share", 0.5) }).asked());
    CHECK_FALSE(applied({ number("hobbit.io_threads", 2) }).asked());
}

TEST_CASE("whole numbers may be given for fractions, as the command line does for 0 and 1") {
    const settings s = applied({ number("hobbit.t1", 0), number("hobbit.t2", 1) });
    CHECK(s.number("hobbit.t1") == 0.0);
    CHECK(s.number("hobbit.t2") == 1.0);
}

TEST_CASE("the numbers that are given choose the rule") {
    CHECK(applied({}).rule() == "gate");
    CHECK(applied({ number("hobbit.price", 0.5) }).rule() == "price");
    CHECK(applied({ number("hobbit.price", 0.5) }).number("hobbit.price") == 0.5);
    CHECK(applied({ number("hobbit.price", 0.5) }).asked());
    CHECK(applied({ number("hobbit.t1", 0.5) }).rule() == "gate");
    CHECK(applied({ text("hobbit.rule", "price"), number("hobbit.t1", 1), number("hobbit.t2", 1) }).rule() == "price");
    CHECK(refused({ text("hobbit.rule", "gate"), number("hobbit.price", 0.5) }).find("belongs to the rule price") !=
          std::string::npos);
    CHECK(refused({ number("hobbit.price", 0.5), number("hobbit.t1", 0.5) }).find("belong to the rule gate") !=
          std::string::npos);
    CHECK(refused({ number("hobbit.price", -1) }).find("hobbit.price is -1: it must lie") == 0);
    CHECK(refused({ number("hobbit.price", NAN) }).find("hobbit.price is nan: it must lie") == 0);
}

TEST_CASE("a stored rule applies with its numbers, unless the caller gives a rule or numbers") {
    const stored_settings stored = {
        { "hobbit.t1", 0.4 }, { "hobbit.t2", 0.9 }, { "hobbit.price", 0.25 }, { "hobbit.rule", std::string("price") }
    };
    const auto with = [&](const std::vector<hobbit_setting> & given) {
        settings     s      = applied(given);
        const status result = s.apply_stored(stored);
        CHECK_MESSAGE(result.ok(), result.message());
        return std::make_tuple(s.rule(), s.number("hobbit.t1"), s.number("hobbit.t2"), s.number("hobbit.price"));
    };
    CHECK(with({}) == std::make_tuple("price", 1.0, 1.0, 0.25));
    CHECK(with({ text("hobbit.rule", "gate") }) == std::make_tuple("gate", 0.4, 0.9, 0.0));
    CHECK(with({ text("hobbit.rule", "price") }) == std::make_tuple("price", 1.0, 1.0, 0.25));
    CHECK(with({ number("hobbit.price", 0.5) }) == std::make_tuple("price", 1.0, 1.0, 0.5));
    CHECK(with({ number("hobbit.t1", 0.7) }) == std::make_tuple("gate", 0.7, 1.0, 0.0));
}

TEST_CASE("live settings are changed one by one and obey the rule") {
    settings s = applied({ number("hobbit.price", 0.5) });
    CHECK(changed(s, { number("hobbit.price", 0.25) }) == "");
    CHECK(s.number("hobbit.price") == 0.25);
    CHECK(s.bounds().low_demand == 1.0);
    CHECK(changed(s, { number("hobbit.price", 0.0) }) == "");
    CHECK(s.bounds().low_demand == 0.0);
    CHECK(applied({ number("hobbit.t1", 0.75) }).bounds().low_demand == 0.25);
    CHECK(changed(settings(s), { number("hobbit.t1", 0.5) }) ==
          "this model runs by price: restart with --set rule=gate to use t1 and t2");
    CHECK(changed(applied({ text("hobbit.rule", "random") }), { number("hobbit.price", 0.5) }) ==
          "this model runs by t1 and t2: restart with --set rule=price to use price");
    CHECK(changed(settings(s), { number("hobbit.price", -1.0) }).find("hobbit.price is -1") == 0);
    CHECK(changed(settings(s), { number("hobbit.prefetch", 1) }) ==
          "hobbit.prefetch cannot be changed while the model is open");
    CHECK(changed(settings(s), { { nullptr, 0.0, nullptr } }) == "a setting has no key: give one");
}

TEST_CASE("of t1 and t2 one that is changed alone moves the other where t1 would be above t2") {
    settings s = applied({ number("hobbit.t1", 0.5), number("hobbit.t2", 0.7) });
    CHECK(changed(s, { number("hobbit.t1", 0.9) }) == "");
    CHECK(s.number("hobbit.t2") == 0.9);
    CHECK(changed(s, { number("hobbit.t2", 0.6) }) == "");
    CHECK(s.number("hobbit.t1") == 0.6);
    CHECK(changed(s, { number("hobbit.t2", 0.8) }) == "");
    CHECK(s.number("hobbit.t1") == 0.6);
    CHECK(changed(s, { number("hobbit.t1", 0.9), number("hobbit.t2", 0.8) }).find("must not be above") !=
          std::string::npos);
}

//
// values, sources and notes
//

static std::map<std::string, hobbit_resolved_setting> described(const settings & s) {
    std::vector<hobbit_resolved_setting> rows(setting_table().size());
    s.describe(rows.data(), rows.size());
    std::map<std::string, hobbit_resolved_setting> by_key;
    for (size_t i = 0; i < rows.size(); i++) {
        by_key[hobbit_setting_spec_at(i)->key] = rows[i];
    }
    return by_key;
}

TEST_CASE("each setting is described with its value and its source") {
    settings s = applied({ number("hobbit.w_lru", 1.0), text("hobbit.sidecar", "x"), number("hobbit.strict", true) });
    CHECK(s.apply_stored({ { "hobbit.prefetch", 1.0 }, { "hobbit.policy", "lru" }, { "hobbit.t1", 0.5 } }, 1).ok());
    auto rows = described(s);
    CHECK(rows["hobbit.w_lru"].source == HOBBIT_SOURCE_GIVEN);
    CHECK(rows["hobbit.w_lru"].number == 1.0);
    CHECK(rows["hobbit.w_lfu"].source == HOBBIT_SOURCE_COMPUTED);
    CHECK(rows["hobbit.w_lfu"].number == 0.0);
    CHECK(rows["hobbit.policy"].source == HOBBIT_SOURCE_COMPUTED);
    CHECK(std::string(rows["hobbit.policy"].text) == "hobbit");
    CHECK(std::string(rows["hobbit.policy"].note) == "as weights are given");
    CHECK(rows["hobbit.prefetch"].source == HOBBIT_SOURCE_FILE);
    CHECK(rows["hobbit.t1"].source == HOBBIT_SOURCE_CALIBRATION);
    CHECK(rows["hobbit.t2"].source == HOBBIT_SOURCE_DEFAULT);
    CHECK(rows["hobbit.strict"].number == 1.0);
    CHECK(std::string(rows["hobbit.sidecar"].text) == "x");
    CHECK(rows["hobbit.memory"].source == HOBBIT_SOURCE_COMPUTED);
    CHECK_FALSE(rows["hobbit.memory"].has_value);
    CHECK(std::string(rows["hobbit.low_share"].note) == "0.5 slots for each of the high pool");
}

TEST_CASE("a stored value that another setting overrules is named in the note") {
    settings s = applied({ number("hobbit.price", 0.5) });
    CHECK(s.apply_stored({ { "hobbit.t1", 0.5 }, { "hobbit.rule", "gate" } }).ok());
    auto rows = described(s);
    CHECK(rows["hobbit.t1"].number == 1.0);
    CHECK(rows["hobbit.t1"].source == HOBBIT_SOURCE_DEFAULT);
    CHECK(std::string(rows["hobbit.t1"].note) == "the model file's does not apply");
    CHECK(std::string(rows["hobbit.rule"].note) == "as price is given");
}

TEST_CASE("two bounds on the same memory are refused") {
    CHECK(refused({ number("hobbit.pools", 1), number("hobbit.device_memory", 1) }).find("give one of them") !=
          std::string::npos);
}

TEST_CASE("the table: keys are unique, every setting has help and takes its own default") {
    std::set<std::string> keys;
    for (size_t i = 0; const hobbit_setting_spec * spec = hobbit_setting_spec_at(i); i++) {
        CAPTURE(spec->key);
        CHECK(keys.insert(spec->key).second);
        CHECK(std::string(spec->help) != "");
        CHECK((spec->type == HOBBIT_TYPE_CHOICE) == (spec->choices != nullptr));
        if (spec->default_value && std::string(spec->option ? spec->option : "") != "weights") {
            const bool is_text = spec->type == HOBBIT_TYPE_CHOICE;
            applied({ is_text ? text(spec->key, spec->default_value) : number(spec->key, atof(spec->default_value)) });
        }
    }
    CHECK(hobbit_setting_spec_at(keys.size()) == nullptr);
    const settings s = applied({});
    CHECK(s.mode() == compute_mode::automatic);
    CHECK(s.policy() == "echo");
    CHECK(s.weights() == policy_options().weights);
}

TEST_CASE("the ranges of numbers, and what a model file may store") {
    struct range {
        double min, max;
        bool   is_stored;
    };
    const std::map<std::string, range> ranges = {
        { "hobbit.memory", { 0, 1e18, false } },
        { "hobbit.pools", { 0, 1e18, false } },
        { "hobbit.price", { 0, 1e9, true } },
        { "hobbit.t1", { 0, 1, true } },
        { "hobbit.t2", { 0, 1, true } },
        { "hobbit.confidence", { 0, 1, false } },
        { "hobbit.low_share", { 0, 1, true } },
        { "hobbit.w_lru", { 0, 1, true } },
        { "hobbit.w_lfu", { 0, 1, true } },
        { "hobbit.w_lhu", { 0, 1, true } },
        { "hobbit.w_fld", { 0, 1, true } },
        { "hobbit.prefetch", { 0, 4, true } },
        { "hobbit.prefetch_bar", { 0, 1, false } },
        { "hobbit.io_threads", { 1, 256, false } },
        { "hobbit.read_timeout", { 1, 86400, false } },
        { "hobbit.snapshots", { 0, 1e6, false } },
        { "hobbit.least_snapshots", { 0, 1e6, false } },
        { "hobbit.device_memory", { 0, 1e18, false } },
        { "hobbit.further", { 0, 1e18, false } },
        { "hobbit.process", { 0, 1e18, false } },
        { "hobbit.requests", { 0, 1e18, false } },
        { "hobbit.early_from", { 0, 1024, false } },
    };
    size_t n_numbers = 0;
    for (size_t i = 0; const hobbit_setting_spec * spec = hobbit_setting_spec_at(i); i++) {
        CAPTURE(spec->key);
        const auto found = ranges.find(spec->key);
        if (found == ranges.end()) { // flags are 0 or 1, and texts have no range
            CHECK(spec->min == 0);
            CHECK(spec->max == (spec->type == HOBBIT_TYPE_FLAG));
            const std::string key = spec->key;
            CHECK(spec->is_stored == (key == "hobbit.rule" || key == "hobbit.policy"));
            continue;
        }
        n_numbers++;
        CHECK(spec->min == found->second.min);
        CHECK(spec->max == found->second.max);
        CHECK(spec->is_stored == found->second.is_stored);
    }
    // Mechanisms have these, and may be left out.
    const int n_absent = !find_setting("hobbit.confidence") + !find_setting("hobbit.early_from");
    CHECK(n_numbers + size_t(n_absent) == ranges.size());
}

TEST_CASE("the switches and their defaults") {
    const settings s = applied({});
    CHECK_FALSE(s.flag("hobbit.strict"));
    CHECK(s.flag("hobbit.calibrated"));
    CHECK(s.flag("hobbit.pack"));
    CHECK(s.count("hobbit.prefetch") == 2);
    CHECK(s.count("hobbit.read_timeout") == 60);
    CHECK(applied({ number("hobbit.strict", 2) }).flag("hobbit.strict")); // whatever is not 0
    CHECK_FALSE(applied({ number("hobbit.pack", false) }).flag("hobbit.pack"));
}

TEST_CASE("every choice is taken, in the order of what it stands for") {
    CHECK(applied({ text("hobbit.mode", "gpu") }).mode() == compute_mode::gpu);
    CHECK(applied({ text("hobbit.mode", "cooperative") }).mode() == compute_mode::cooperative);
    CHECK(applied({ text("hobbit.rule", "random") }).rule() == "random");
    for (const std::string & name : registered_policy::names()) {
        CHECK(applied({ text("hobbit.policy", name.c_str()) }).policy() == name);
    }
    CHECK(applied({}).text("hobbit.predictor") == predictor_options().name);
    for (const std::string & name : registered_predictor::names()) {
        CHECK(applied({ text("hobbit.predictor", name.c_str()) }).text("hobbit.predictor") == name);
    }
    CHECK(refused({ text("hobbit.mode", "gpu cooperative") }).find("choose one of") != std::string::npos);
    CHECK(refused({ text("hobbit.mode", "") }).find("choose one of") != std::string::npos);
}

TEST_CASE("an unknown key is refused by name") {
    CHECK(refused({ number("hobbit.t3", 0.5) }) == "unknown setting hobbit.t3");
    CHECK(refused({ number("t1", 0.5) }) == "unknown setting t1");
}

TEST_CASE("a value of the wrong kind is refused") {
    CHECK(refused({ text("hobbit.t1", "high") }) == "hobbit.t1 takes a number, not the text 'high'");
    CHECK(refused({ number("hobbit.sidecar", 1) }) == "hobbit.sidecar takes a text");
}

TEST_CASE("values out of range are refused") {
    CHECK(refused({ number("hobbit.t1", -0.1) }).find("hobbit.t1 is -0.1: it must lie between 0 and 1") == 0);
    CHECK(refused({ number("hobbit.memory", -1) }).find("hobbit.memory is -1: it must lie") == 0);
    CHECK(refused({ number("hobbit.t1", std::nan("")) }).find("hobbit.t1") != std::string::npos);
    CHECK(refused({ number("hobbit.t2", std::numeric_limits<double>::infinity()) }).find("hobbit.t2") !=
          std::string::npos);
    CHECK(refused({ number("hobbit.t1", 0.5), number("hobbit.t2", 1.5) })
              .find("hobbit.t2 is 1.5: it must lie between 0 and 1") == 0);
    CHECK(refused({ number("hobbit.low_share", 1.01) }).find("hobbit.low_share is 1.01: it must lie between 0 and 1") ==
          0);
    CHECK(refused({ number("hobbit.io_threads", 0) }).find("between 1 and 256") != std::string::npos);
    CHECK(refused({ number("hobbit.io_threads", 257) }).find("between 1 and 256") != std::string::npos);
    // 2^32 + 4 must not wrap to 4
    CHECK(refused({ number("hobbit.io_threads", (int64_t(1) << 32) + 4) }).find("between 1 and 256") !=
          std::string::npos);
}

TEST_CASE("t1 above t2 is refused") {
    CHECK(refused({ number("hobbit.t1", 0.9), number("hobbit.t2", 0.5) })
              .find("hobbit.t1 (0.9) must not be above hobbit.t2 (0.5)") != std::string::npos);
}

TEST_CASE("t2 given alone lowers t1 to it: what is not skipped is high") {
    const settings s = applied({ number("hobbit.t2", 0.9) });
    CHECK(s.number("hobbit.t1") == 0.9);
    CHECK(s.number("hobbit.t2") == 0.9);
}

TEST_CASE("t1 given alone leaves t2 at 1") {
    const settings s = applied({ number("hobbit.t1", 0.5) });
    CHECK(s.number("hobbit.t1") == 0.5);
    CHECK(s.number("hobbit.t2") == 1.0);
}
