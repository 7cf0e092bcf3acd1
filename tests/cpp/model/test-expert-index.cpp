// SPDX-License-Identifier: MIT
#include "model/expert-index.h"

#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"

#include <array>
#include <cmath>
#include <doctest/doctest.h>
#include <string>
#include <utility>
#include <vector>

using namespace hobbit;

// Bytes of the file at the location.
static std::string bytes_at(const expert_index & index, const part_location & at) {
    return temp_dir::read(index.files()[at.file]).substr(at.offset, at.size);
}

// Slice `i` of `n` of the bytes.
static std::string slice(const std::string & bytes, size_t i, size_t n) {
    return bytes.substr(i * (bytes.size() / n), bytes.size() / n);
}

TEST_CASE("a plain GGUF has one tier, whose experts are the slices of its tensors") {
    for (const uint32_t alignment : { 32, 4096 }) {
        CAPTURE(alignment);
        temp_dir        dir;
        gguf_builder    file(alignment);
        const moe_model model;
        model.add_high(file);
        expert_index index;
        REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());

        CHECK(index.n_layers() == 2);
        CHECK(index.n_tiers() == 1);
        CHECK(index.n_experts() == 4);
        CHECK(index.n_experts_used() == 2);
        CHECK(index.model_bytes() == std::filesystem::file_size(dir.path("m.gguf")));
        // f16: 2 layers x 3 parts x 4 experts x 64 x 32 x 2 bytes
        CHECK(index.tier_bytes(tier_id::high) == 98304);
        CHECK(index.tier_bytes(tier_id::low) == 0);
        const std::pair<part_id, const char *> parts[] = { { part_id::gate, "gate" },
                                                           { part_id::up, "up" },
                                                           { part_id::down, "down" } };
        for (layer_id layer = 0; layer < 2; layer++) {
            CHECK(index.layer(layer).n_experts == 4);
            CHECK(index.layer(layer).parts == (part_id::gate | part_id::up | part_id::down));
            for (const auto & [part, name] : parts) {
                for (uint32_t e = 0; e < 4; e++) {
                    const part_location & at = index.locate(tier_id::high, layer, part, e);
                    CHECK(at.type == GGML_TYPE_F16);
                    CHECK(bytes_at(index, at) == slice(file.data(moe_model::name(layer, name)), e, 4));
                }
            }
        }
        CHECK(index.layer(0).shapes[part_id::up].n_in == 64);
        CHECK(index.layer(0).shapes[part_id::up].n_out == 32);
        CHECK(index.layer(0).shapes[part_id::down].n_in == 32);
        CHECK(index.layer(0).shapes[part_id::down].n_out == 64);
    }
}

TEST_CASE("a two-tier file has every expert twice") {
    temp_dir        dir;
    gguf_builder    file(4096);
    const moe_model model;
    model.add_high(file);
    model.add_low(file);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.n_tiers() == 2);
    // q4_0: 18 bytes for 32 weights, 2 layers x 3 parts x 4 experts x 64 weights x 32
    CHECK(index.tier_bytes(tier_id::low) == 27648);
    for (uint32_t e = 0; e < 4; e++) {
        const part_location & low = index.locate(tier_id::low, 1, part_id::down, e);
        CHECK(low.type == GGML_TYPE_Q4_0);
        CHECK(bytes_at(index, low) == slice(file.data("blk.1.ffn_down_exps.low.0.weight"), e, 4));
        const part_location & high = index.locate(tier_id::high, 1, part_id::down, e);
        CHECK(high.type == GGML_TYPE_F16);
        CHECK(bytes_at(index, high) == slice(file.data("blk.1.ffn_down_exps.weight"), e, 4));
    }
}

TEST_CASE("groups of a tier hold the experts that they list, each in its own type") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    model;
    model.n_layers = 1;
    model.add_high(file);
    moe_model::declare_tiers(file);
    add_grouped_low(file);
    expert_index index;
    const status s = index.open(file.write(dir.path("m.gguf")), "");
    REQUIRE_MESSAGE(s.ok(), s.message());

    const std::string & q8 = file.data("blk.0.ffn_up_exps.low.0.weight");
    const std::string & q4 = file.data("blk.0.ffn_up_exps.low.1.weight");
    CHECK(index.locate(tier_id::low, 0, part_id::up, 2).type == GGML_TYPE_Q8_0);
    CHECK(bytes_at(index, index.locate(tier_id::low, 0, part_id::up, 2)) == q8);
    const uint32_t listed[] = { 3, 0, 1 };
    for (size_t i = 0; i < 3; i++) {
        const part_location & at = index.locate(tier_id::low, 0, part_id::up, listed[i]);
        CHECK(at.type == GGML_TYPE_Q4_0);
        CHECK(bytes_at(index, at) == slice(q4, i, 3));
    }
}

TEST_CASE("layers are numbered without gaps, whatever their blocks") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    model;
    model.first_block = 9; // blk.9 and blk.10, which do not sort like text
    model.add_high(file);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    REQUIRE(index.n_layers() == 2);
    CHECK(index.layer(0).block == 9);
    CHECK(index.layer(1).block == 10);
    const expert_tensor * tensor = index.find_tensor("blk.10.ffn_up_exps.weight");
    REQUIRE(tensor);
    CHECK(tensor->layer == 1);
    CHECK(tensor->part == part_id::up);
    CHECK_FALSE(index.find_tensor("blk.1.ffn_up_exps.weight"));
}

TEST_CASE("gate and up may be fused, and the gate may be missing") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    model;
    model.fused = true;
    model.add_high(file);
    file.add("blk.2.ffn_up_exps.weight", GGML_TYPE_F32, 64, 32, 4);
    file.add("blk.2.ffn_down_exps.weight", GGML_TYPE_F32, 32, 64, 4);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.layer(0).parts == (part_id::gate_up | part_id::down));
    CHECK(index.layer(0).shapes[part_id::gate_up].n_out == 64);
    CHECK(index.layer(2).parts == (part_id::up | part_id::down));
}

TEST_CASE("the largest layer counts where layers differ in their number of experts") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    model;
    model.add_high(file);
    file.add("blk.2.ffn_up_exps.weight", GGML_TYPE_F32, 64, 32, 7);
    file.add("blk.2.ffn_down_exps.weight", GGML_TYPE_F32, 32, 64, 7);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.n_experts() == 7);
    CHECK(index.layer(0).n_experts == 4);
}

TEST_CASE("experts may be one wide") {
    temp_dir     dir;
    gguf_builder file(32);
    moe_model    model;
    model.n_ff = 1;
    model.add_high(file);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.layer(0).shapes[part_id::down].n_in == 1);
    CHECK(index.layer(0).shapes[part_id::up].n_out == 1);
}

TEST_CASE("only llama.cpp's expert weights are experts") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    model;
    model.add_high(file);
    const char * others[] = { "blk.0.ffn_up_exps.bias",
                              "blk.0.ffn_up_exps.scale",
                              "blk.0.ffn_up_shexp.weight",
                              "blk.0.ffn_gate_inp.weight",
                              "blk.0.ffn_up_exps.weight.extra",
                              "blk.0.ffn_up_exps",
                              "blk.0.ffn_up.weight",
                              "x.blk.0.ffn_up_exps.weight",
                              "blk.00.ffn_up_exps.weight",
                              "blk.+0.ffn_up_exps.weight",
                              "blk. 0.ffn_up_exps.weight",
                              "blk.0.ffn_up_exps.weight x",
                              "blk.-1.ffn_up_exps.weight",
                              "blk.4294967296.ffn_up_exps.weight",
                              "blk.0.ffn_up_exps.low.weight",
                              "blk.0.ffn_up_exps.low.0.weightx" };
    for (const char * name : others) {
        file.add(name, GGML_TYPE_F32, 32, 1, 1);
    }
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.n_layers() == 2);
    CHECK(index.tier_bytes(tier_id::high) == 98304); // as without the others
    for (const char * name : others) {
        CAPTURE(name);
        CHECK_FALSE(index.find_tensor(name));
        CHECK_FALSE(is_tier_tensor(name));
    }
    CHECK(index.find_tensor("blk.0.ffn_up_exps.weight"));
    CHECK_FALSE(index.find_tensor("blk.0.ffn_gate_up_exps.weight")); // not in this model
}

TEST_CASE("tier tensors are told by their name") {
    CHECK(is_tier_tensor("blk.0.ffn_up_exps.low.0.weight"));
    CHECK(is_tier_tensor("blk.61.ffn_gate_up_exps.low.12.weight"));
    CHECK_FALSE(is_tier_tensor("blk.0.ffn_up_exps.weight"));
    CHECK_FALSE(is_tier_tensor("blk.0.ffn_up_exps.low.0.bias"));
    CHECK_FALSE(is_tier_tensor("blk.0.ffn_up_exps.low.x.weight"));
}

TEST_CASE("a dense model opens without layers") {
    temp_dir     dir;
    gguf_builder file;
    gguf_set_val_str(file.keys(), "general.architecture", "test");
    file.add("blk.0.ffn_up.weight", GGML_TYPE_F32, 32, 4, 1);
    expert_index index;
    CHECK(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.n_layers() == 0);
    CHECK(index.n_tiers() == 0);
    CHECK(index.n_experts() == 0);
}

TEST_CASE("a split model's experts are found in all its parts") {
    temp_dir     dir;
    gguf_builder first;
    gguf_builder second;
    gguf_set_val_u16(first.keys(), "split.count", 2);
    gguf_set_val_u16(second.keys(), "split.no", 1);
    moe_model model;
    model.n_layers = 1;
    model.add_high(first);
    model.first_block = 1;
    model.add_tensors(second, GGML_TYPE_F16, "");
    const std::string path = first.write(dir.path("m-00001-of-00002.gguf"));
    second.write(dir.path("m-00002-of-00002.gguf"));

    expert_index index;
    REQUIRE(index.open(path, "").ok());
    REQUIRE(index.n_layers() == 2);
    CHECK(index.files().size() == 2);
    CHECK(index.locate(tier_id::high, 0, part_id::up, 3).file == 0);
    CHECK(index.locate(tier_id::high, 1, part_id::up, 3).file == 1);
    CHECK(bytes_at(index, index.locate(tier_id::high, 1, part_id::up, 3)) ==
          slice(second.data("blk.1.ffn_up_exps.weight"), 3, 4));
    CHECK(index.model_bytes() ==
          std::filesystem::file_size(index.files()[0]) + std::filesystem::file_size(index.files()[1]));
}

TEST_CASE("thresholds and share stored in the file are handed on") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    gguf_set_val_f32(file.keys(), "hobbit.t1", 0.5f);
    gguf_set_val_f64(file.keys(), "hobbit.low_share", 0.25);
    gguf_set_val_u32(file.keys(), "hobbit.memory", 5); // not for a file to say
    expert_index index({ "hobbit.t1", "hobbit.low_share", "hobbit.policy" });
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.stored() == stored_settings{ { "hobbit.t1", 0.5 }, { "hobbit.low_share", 0.25 } });
}

// A calibration of a model of so many bytes.
static void write_calibration(const std::string & path, uint64_t model_bytes) {
    gguf_builder file;
    gguf_set_val_u64(file.keys(), "hobbit.model_bytes", model_bytes);
    gguf_set_val_f64(file.keys(), "hobbit.t1", 0.7);
    gguf_set_val_str(file.keys(), "hobbit.policy", "lfu");
    const std::array<float, 2> low  = { 0.5f, 0.25f };
    const std::array<float, 2> skip = { 4.0f, 2.0f };
    gguf_set_arr_data(file.keys(), "hobbit.low_costs", GGUF_TYPE_FLOAT32, low.data(), low.size());
    gguf_set_arr_data(file.keys(), "hobbit.skip_costs", GGUF_TYPE_FLOAT32, skip.data(), skip.size());
    file.write(path);
}

TEST_CASE("a calibration beside the model comes last") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    gguf_set_val_f32(file.keys(), "hobbit.t1", 0.5f);
    const std::string path = file.write(dir.path("m.gguf"));
    write_calibration(dir.path("m.calibration.gguf"), std::filesystem::file_size(path));
    expert_index index({ "hobbit.t1", "hobbit.policy" });
    REQUIRE(index.open(path, "").ok());
    CHECK(index.stored() == stored_settings{ { "hobbit.t1", 0.5 } });
    REQUIRE(index.read_calibration(path).ok());
    CHECK(index.stored() == stored_settings{ { "hobbit.t1", 0.5 }, { "hobbit.t1", 0.7 }, { "hobbit.policy", "lfu" } });
    CHECK(index.calibration().low_costs == std::vector<float>{ 0.5f, 0.25f });
    CHECK(index.calibration().skip_costs == std::vector<float>{ 4.0f, 2.0f });
}

TEST_CASE("a calibration tells how often experts were used") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file); // 2 layers of 4 experts
    const std::string path  = file.write(dir.path("m.gguf"));
    const auto        write = [&](const std::vector<int32_t> & uses) {
        gguf_builder calibration;
        gguf_set_val_u64(calibration.keys(), "hobbit.model_bytes", std::filesystem::file_size(path));
        calibration.set_ints("hobbit.expert_uses", uses);
        calibration.write(dir.path("m.calibration.gguf"));
    };
    expert_index index;
    REQUIRE(index.open(path, "").ok());
    CHECK(index.calibration().uses.empty());
    const std::vector<int32_t> uses = { 0, 5, 2, 0, 5, 0, 0, 9 };
    write(uses);
    REQUIRE(index.read_calibration(path).ok());
    CHECK(index.calibration().uses == uses);
    const std::vector<std::vector<int32_t>> refused = { { 1, 2, 3 }, { 0, 5, 2, 0, 5, 0, 0, -9 } };
    for (const std::vector<int32_t> & others : refused) {
        write(others);
        CHECK(index.read_calibration(path).message().find("calibrate '" + path + "' again") != std::string::npos);
    }
}

TEST_CASE("a calibration's activation paths are those of the model's experts, or the file is refused") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file); // 2 layers of 4 experts
    const std::string path  = file.write(dir.path("m.gguf"));
    const auto        write = [&](const std::vector<int32_t> & paths) {
        gguf_builder calibration;
        gguf_set_val_u64(calibration.keys(), "hobbit.model_bytes", std::filesystem::file_size(path));
        calibration.set_ints("hobbit.paths", paths);
        calibration.write(dir.path("m.calibration.gguf"));
    };
    expert_index index;
    REQUIRE(index.open(path, "").ok());
    // layer, tokens, numbers of experts now, before and next
    const std::vector<int32_t> paths = { 1, 9, 0, 0, 1, 256 * 3 + 9, 1, 4, 1, 0, 2, 2, 0 + 4, 256 * 3 + 1 };
    write(paths);
    REQUIRE(index.read_calibration(path).ok());
    CHECK(index.calibration().paths == paths);
    const std::vector<std::vector<int32_t>> refused = {
        { 1, 9, 0, 0 },                 // cut
        { 1, 9, 0, 0, 1 },              // cut
        { 1, 9, 0, 0, 70000 },          // cut
        { 1, 9, 0, 0, -1, 3 },          // negative numbers
        { -1, 9, 0, 0, 1, 9 },          // negative numbers
        { 1, 9, 0, 0, 1, -9 },          // negative numbers
        { 2, 9, 0, 0, 1, 9 },           // no such layer
        { 1, 0, 0, 0, 0 },              // zero tokens
        { 1, 256, 0, 0, 1, 9 },         // more tokens than a byte counts
        { 1, 9, 0, 0, 1, 256 * 4 + 9 }, // no such expert
        { 1, 9, 1, 0, 1, 4, 9 },        // no such expert
        { 1, 9, 0, 0, 1, 10 },          // more tokens than there are
        { 1, 9, 2, 0, 1, 0, 1, 9 },     // a pair of three
        { 0, 9, 1, 0, 1, 0, 9 },        // before the first layer
        { 1, 9, 1, 1, 1, 0, 0, 9 },     // before the first layer
        { 1, 9, 0, 1, 1, 0, 9 },        // nothing between
    };
    for (const std::vector<int32_t> & others : refused) {
        CAPTURE(others);
        write(others);
        const std::string why = index.read_calibration(path).message();
        CHECK(why.find("its activation paths are not of this model's experts: calibrate '" + path + "' again") !=
              std::string::npos);
    }
}

TEST_CASE("a calibration of another model or a damaged one is an error that says what to do") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    const std::string path        = file.write(dir.path("m.gguf"));
    const std::string calibration = dir.path("m.calibration.gguf");
    expert_index      index;
    REQUIRE(index.open(path, "").ok());
    CHECK(index.read_calibration(path).ok()); // there is none
    write_calibration(calibration, 1);
    CHECK(index.read_calibration(path).message().find("another version of") != std::string::npos);
    dir.write("m.calibration.gguf", "GGUF");
    CHECK(index.read_calibration(path).message().find("calibrate '" + path + "' again") != std::string::npos);
    dir.write("m.calibration.gguf", temp_dir::read(path)); // a model
    CHECK(index.read_calibration(path).message().find("cannot be used") != std::string::npos);
}
