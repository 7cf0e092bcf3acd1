// SPDX-License-Identifier: MIT
//
// Files whose tiers lack experts.
#include "fixtures/check-contains.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "model/expert-index.h"

#include <algorithm>
#include <array>
#include <doctest/doctest.h>
#include <functional>
#include <string>

using namespace hobbit;

static const std::vector<std::vector<int32_t>> PRESENT = { { 0, 3 }, {} };

TEST_CASE("the experts that are listed have a high version, all have a low one") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_low_and_partial(file, PRESENT);
    expert_index index;
    const status s = index.open(file.write(dir.path("m.gguf")), "");
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(index.n_tiers() == 2);
    REQUIRE(index.serving());
    CHECK(index.n_held(tier_id::high, 0, 0) == 2);
    CHECK(index.n_held(tier_id::high, 1, 1) == 0);
    CHECK(index.n_held(tier_id::high) == 2);
    CHECK(index.n_held(tier_id::low) == 8);
    CHECK(index.tier_bytes(tier_id::high) == 2 * 3 * 64 * 32 * 2);
    CHECK(index.tier_bytes(tier_id::low) == 27648);
    for (layer_id layer = 0; layer < 2; layer++) {
        for (uint32_t e = 0; e < 4; e++) {
            CHECK(index.has(tier_id::low, { layer, e }));
            CHECK(index.has(tier_id::high, { layer, e }) == (layer == 0 && (e == 0 || e == 3)));
            const precision best = index.has(tier_id::high, { layer, e }) ? precision::high : precision::low;
            for (const precision given : { precision::skip, precision::low, precision::high }) {
                CHECK(index.serving()({ layer, e }, given) == std::min(given, best));
            }
        }
    }
    const part_location & at    = index.locate(tier_id::high, 0, part_id::down, 3);
    const std::string &   bytes = file.data("blk.0.ffn_down_exps.high.0.weight");
    CHECK(temp_dir::read(index.files()[0]).substr(at.offset, at.size) == bytes.substr(bytes.size() / 2));

    CHECK(index.expert_bytes({ 0, 3 }, tier_id::high) == 3 * 64 * 32 * 2);
    CHECK(index.expert_bytes({ 0, 1 }, tier_id::high) == 0);
}

TEST_CASE("a tier that lacks nothing knows of no absent expert") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    moe_model().add_low(file);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.n_held(tier_id::high) == 8);
    CHECK_FALSE(index.serving());
}

// Adds tensors to a file: high versions of these experts, [layer].
using adding = void (moe_model::*)(gguf_builder &, const std::vector<std::vector<int32_t>> & high) const;

// The error of a model whose tensors `add` has added, and which `change` has changed.
static std::string refused(adding add, const std::vector<std::vector<int32_t>> & high,
                           const std::function<void(gguf_builder &)> & change) {
    temp_dir     dir;
    gguf_builder file;
    (moe_model().*add)(file, high);
    change(file);
    expert_index index;
    return index.open(file.write(dir.path("m.gguf")), "").message();
}

static std::string refused(const std::function<void(gguf_builder &)> & change,
                           const std::vector<std::vector<int32_t>> &   high = PRESENT) {
    return refused(&moe_model::add_low_and_partial, high, change);
}

TEST_CASE("the error of an unknown version names those that are read") {
    CHECK_CONTAINS(refused([](auto & f) { gguf_set_val_u32(f.keys(), "hobbit.version", 5); }),
                   "is of hobbit format version 5, this program reads versions 1, 3, 4");
}

TEST_CASE("lists that cannot be are refused") {
    const std::string key       = "hobbit.tier.high.blk.0.ffn_up_exps.0.experts";
    const auto        with_list = [&](const std::vector<int32_t> & experts) {
        return refused([&](gguf_builder & file) { file.set_ints(key, experts); });
    };
    CHECK_CONTAINS(with_list({ 0 }), "has shape 64 x 32 x 2, the model asks for 64 x 32 x 1");
    CHECK_CONTAINS(with_list({ 0, 1, 3 }), "has shape 64 x 32 x 2, the model asks for 64 x 32 x 3");
    CHECK_CONTAINS(with_list({}), "has shape 64 x 32 x 2, the model asks for 64 x 32 x 0");
    CHECK_CONTAINS(with_list({ 0, 4 }), "names expert 4 of 4");
    CHECK_CONTAINS(with_list({ -1, 3 }), "names expert -1 of 4");
    CHECK_CONTAINS(with_list({ 3, 3 }), "repeats expert 3");
    CHECK_CONTAINS(with_list({ 0, 2 }), "has some of the tensors of expert 2 of blk.0 and lacks others");
    CHECK_CONTAINS(refused([&](auto & f) { gguf_set_val_u32(f.keys(), key.c_str(), 0); }),
                   "must be an array of 32-bit integers");
    CHECK_CONTAINS(refused([&](auto & f) { gguf_remove_key(f.keys(), key.c_str()); }),
                   "has shape 64 x 32 x 2, the model asks for 64 x 32 x 4");
    CHECK_CONTAINS(refused([](auto &) {}, { {}, {} }), "the high tier has no expert at all");
    CHECK_CONTAINS(refused([](auto & f) { f.add("blk.1.ffn_up_exps.high.0.weight", GGML_TYPE_F16, 64, 32, 4); }),
                   "has some of the tensors of expert 0 of blk.1 and lacks others");
}

TEST_CASE("what the keys say must fit together") {
    const auto with = [](const char * key, const char * value) {
        return refused([&](gguf_builder & file) { gguf_set_val_str(file.keys(), key, value); });
    };
    CHECK_CONTAINS(with("hobbit.base_tier", "high"),
                   "hobbit.base_tier is 'high', and with format version 3 it is 'low'");
    CHECK_CONTAINS(with("hobbit.base_tier", "none"),
                   "hobbit.base_tier is 'none', and with format version 3 it is 'low'");
    CHECK_CONTAINS(refused([](auto & f) { gguf_remove_key(f.keys(), "hobbit.base_tier"); }), "base_tier is ''");
    CHECK_CONTAINS(with("hobbit.tier.low.kind", "partial"), "hobbit.tier.low.kind is 'partial', and");
    CHECK_CONTAINS(with("hobbit.tier.high.kind", "complete"),
                   "kind is 'complete', and with format version 3 it is 'partial'");
    CHECK_CONTAINS(refused([](auto & f) { gguf_set_val_u32(f.keys(), "hobbit.version", 1); }),
                   "hobbit.tier.high.kind is 'partial', and with format version 1 it is 'complete'");
}

TEST_CASE("each expert may lie in one tier alone") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_once(file, { { 0, 3 }, { 0, 1, 2, 3 } });
    expert_index index;
    const status s = index.open(file.write(dir.path("m.gguf")), "");
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(index.n_tiers() == 2);
    REQUIRE(index.n_layers() == 2);
    CHECK(index.experts_by_layer() == std::vector<uint32_t>{ 4, 4 });
    CHECK(index.n_held(tier_id::high) == 6);
    CHECK(index.n_held(tier_id::low) == 2);
    CHECK(index.n_held(tier_id::low, 1, 1) == 0);
    CHECK(index.find_tensor("blk.1.ffn_up_exps.weight"));
    for (layer_id layer = 0; layer < 2; layer++) {
        for (uint32_t e = 0; e < 4; e++) {
            const bool high = layer == 1 || e == 0 || e == 3;
            CHECK(index.has(tier_id::high, { layer, e }) == high);
            CHECK(index.has(tier_id::low, { layer, e }) != high);
            for (const precision given : { precision::low, precision::high }) {
                CHECK(index.serving()({ layer, e }, given) == (high ? precision::high : precision::low));
            }
            CHECK(index.serving()({ layer, e }, precision::skip) == precision::skip);
        }
    }
    const part_location & at    = index.locate(tier_id::low, 0, part_id::down, 2);
    const std::string &   bytes = file.data("blk.0.ffn_down_exps.low.0.weight");
    CHECK(temp_dir::read(index.files()[0]).substr(at.offset, at.size) == bytes.substr(bytes.size() / 2));
}

TEST_CASE("experts that lie in no tier or in two are refused") {
    const auto refused = [](const std::function<void(gguf_builder &)> & change,
                            const std::vector<std::vector<int32_t>> &   high = { { 0, 3 }, { 1 } }) {
        return ::refused(&moe_model::add_once, high, change);
    };
    const auto listed = [&](const std::vector<const char *> & parts, const std::vector<int32_t> & experts) {
        return refused([&](gguf_builder & file) {
            for (const std::string part : parts) {
                file.set_ints("hobbit.tier.low.blk.0.ffn_" + part + "_exps.0.experts", experts);
            }
        });
    };
    CHECK(listed({}, {}).empty());
    CHECK_CONTAINS(listed({ "gate", "up", "down" }, { 1, 3 }), "expert 2 of blk.0 is in no tier: convert");
    CHECK_CONTAINS(listed({ "gate", "up", "down" }, { 2, 0 }), "expert 1 of blk.0 is in no tier: convert");
    CHECK_CONTAINS(listed({ "gate", "up", "down" }, { 1, 1 }), "repeats expert 1");
    CHECK_CONTAINS(listed({ "gate", "up", "down" }, { 1, 4 }), "names expert 4 of 4");
    CHECK_CONTAINS(listed({ "up" }, { 1, 3 }), "the low tier has some of the tensors of expert 2 of blk.0 and lacks");
    CHECK_CONTAINS(refused([](auto & f) { gguf_remove_key(f.keys(), "hobbit.tier.low.blk.0.ffn_up_exps.0.experts"); }),
                   "has shape 64 x 32 x 2, the model asks for 64 x 32 x 4");
    CHECK_CONTAINS(refused([](auto & f) { f.add("blk.0.ffn_up_exps.low.1.weight", GGML_TYPE_F16, 64, 32, 1); }),
                   "blk.0.ffn_up_exps has 5 experts, and ffn_down_exps of its layer 4");
    CHECK_CONTAINS(refused([](auto & f) { moe_model().add_tensors(f, GGML_TYPE_F16, ""); }),
                   "expert 4 of blk.0 is in no tier: convert");
    CHECK_CONTAINS(refused([](auto &) {}, { {}, {} }), "the high tier has no expert at all");
    CHECK_CONTAINS(refused([](auto &) {}, { { 0, 1, 2, 3 }, { 0, 1, 2, 3 } }), "the low tier has no expert at all");
    for (const auto & [key, found, wanted] : { std::array{ "base_tier", "low", "none" },
                                               { "tier.low.kind", "complete", "partial" },
                                               { "tier.high.kind", "complete", "partial" } }) {
        const std::string name = std::string("hobbit.") + key;
        CHECK_CONTAINS(refused([&](auto & f) { gguf_set_val_str(f.keys(), name.c_str(), found); }),
                       name + " is '" + found + "', and with format version 4 it is '" + wanted + "'");
    }
}
