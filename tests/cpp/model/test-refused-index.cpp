// SPDX-License-Identifier: MIT
#include "model/expert-index.h"

#include "fixtures/check-contains.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"

#include <doctest/doctest.h>
#include <string>

using namespace hobbit;

static std::string error_of(const std::string & path) {
    expert_index index;
    return index.open(path, "").message();
}

// Overwrites a dimension in a file's table, as damage would. Only of the last tensor: the others' places follow from
// it.
static void set_dimension(const std::string & path, const std::string & name, size_t dimension, char value) {
    std::string  bytes = temp_dir::read(path);
    const size_t at    = bytes.find(name) + name.size() + sizeof(uint32_t) + dimension * sizeof(int64_t);
    bytes[at]          = value;
    std::ofstream(path, std::ios::binary) << bytes;
}

TEST_CASE("a high tier that makes no sense is refused") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    std::string expected;
    SUBCASE("no down projection") {
        file.add("blk.7.ffn_up_exps.weight", GGML_TYPE_F32, 64, 32, 4);
        expected = "layer 7 lacks some of its expert tensors";
    }
    SUBCASE("nothing but a down projection") {
        file.add("blk.7.ffn_down_exps.weight", GGML_TYPE_F32, 32, 64, 4);
        expected = "layer 7 lacks some of its expert tensors";
    }
    SUBCASE("another number of experts in one part") {
        file.add("blk.7.ffn_up_exps.weight", GGML_TYPE_F32, 64, 32, 4);
        file.add("blk.7.ffn_down_exps.weight", GGML_TYPE_F32, 32, 64, 5);
        expected = "blk.7.ffn_up_exps has 4 experts, and ffn_down_exps of its layer 5";
    }
    SUBCASE("experts of nothing") {
        file.add("blk.7.ffn_up_exps.weight", GGML_TYPE_F32, 64, 0, 4);
        expected = "tensor 'blk.7.ffn_up_exps.weight' has a dimension of 0";
    }
    CHECK_CONTAINS(error_of(file.write(dir.path("m.gguf"))), expected);
}

TEST_CASE("a tensor of no experts is refused") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    const std::string path = file.write(dir.path("m.gguf"));
    set_dimension(path, "blk.1.ffn_down_exps.weight", 2, 0);
    CHECK_CONTAINS(error_of(path), "tensor 'blk.1.ffn_down_exps.weight' has a dimension of 0");
}

TEST_CASE("the same tensor in two parts of a split model is refused") {
    temp_dir        dir;
    gguf_builder    first;
    gguf_builder    second;
    const moe_model model;
    gguf_set_val_u16(first.keys(), "split.count", 2);
    model.add_high(first);
    gguf_set_val_u16(second.keys(), "split.no", 1);
    second.add("blk.0.ffn_up_exps.weight", GGML_TYPE_F32, 64, 32, 4);
    second.write(dir.path("m-00002-of-00002.gguf"));
    CHECK_CONTAINS(error_of(first.write(dir.path("m-00001-of-00002.gguf"))),
                   "tensor 'blk.0.ffn_up_exps.weight' is in the model twice");
}

// A file with a good high tier, and a low tier that lacks blk.0's up projection.
static void add_all_but_up(gguf_builder & file) {
    moe_model model;
    model.n_layers = 1;
    model.add_high(file);
    moe_model::declare_tiers(file);
    file.add("blk.0.ffn_gate_exps.low.0.weight", GGML_TYPE_Q4_0, 64, 32, 4);
    file.add("blk.0.ffn_down_exps.low.0.weight", GGML_TYPE_Q4_0, 32, 64, 4);
}

TEST_CASE("a low tier that does not match the high one is refused") {
    temp_dir     dir;
    gguf_builder file;
    add_all_but_up(file);
    const std::string low     = "blk.0.ffn_up_exps.low.0.weight";
    const std::string experts = "hobbit.tier.low.blk.0.ffn_up_exps.0.experts";
    std::string       expected;
    SUBCASE("a part is missing") {
        expected = "the low tier lacks expert 0 of blk.0.ffn_up_exps";
    }
    SUBCASE("an expert is missing") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 3);
        file.set_ints(experts, { 0, 1, 3 });
        expected = "the low tier lacks expert 2 of blk.0.ffn_up_exps";
    }
    SUBCASE("an expert is repeated") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
        file.set_ints(experts, { 0, 1, 2, 1 });
        expected = "tensor '" + low + "' repeats expert 1";
    }
    SUBCASE("an expert is repeated in a second group") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
        file.add("blk.0.ffn_up_exps.low.1.weight", GGML_TYPE_Q8_0, 64, 32, 1);
        file.set_ints("hobbit.tier.low.blk.0.ffn_up_exps.1.experts", { 3 });
        expected = "tensor 'blk.0.ffn_up_exps.low.1.weight' repeats expert 3";
    }
    SUBCASE("an expert does not exist") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
        file.set_ints(experts, { 0, 1, 2, 4 });
        expected = "tensor '" + low + "' names expert 4 of 4";
    }
    SUBCASE("an expert is negative") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
        file.set_ints(experts, { 0, 1, 2, -1 });
        expected = "tensor '" + low + "' names expert -1 of 4";
    }
    SUBCASE("another shape") {
        file.add(low, GGML_TYPE_Q4_0, 32, 64, 4);
        expected = "tensor '" + low + "' has shape 32 x 64 x 4, the model asks for 64 x 32 x 4";
    }
    SUBCASE("fewer slices than experts listed") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 2);
        file.set_ints(experts, { 0, 1, 2 });
        expected = "has shape 64 x 32 x 2, the model asks for 64 x 32 x 3";
    }
    SUBCASE("a list that is none") {
        file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
        gguf_set_val_u32(file.keys(), experts.c_str(), 4);
        expected = experts + " must be an array of 32-bit integers";
    }
    SUBCASE("a tier that is not declared") {
        file.add("blk.0.ffn_up_exps.tiny.0.weight", GGML_TYPE_Q4_0, 64, 32, 4);
        expected =
            "tensor 'blk.0.ffn_up_exps.tiny.0.weight' belongs to no expert tensor of the model, or to no further tier";
    }
    SUBCASE("a layer without experts") {
        file.add("blk.1.ffn_up_exps.low.0.weight", GGML_TYPE_Q4_0, 64, 32, 4);
        expected =
            "tensor 'blk.1.ffn_up_exps.low.0.weight' belongs to no expert tensor of the model, or to no further tier";
    }
    CHECK_CONTAINS(error_of(file.write(dir.path("m.gguf"))), expected);
}

TEST_CASE("a group of no experts is refused") {
    temp_dir          dir;
    gguf_builder      file;
    const std::string low = "blk.0.ffn_up_exps.low.0.weight";
    add_all_but_up(file);
    file.add(low, GGML_TYPE_Q4_0, 64, 32, 4);
    file.set_ints("hobbit.tier.low.blk.0.ffn_up_exps.0.experts", {});
    const std::string path = file.write(dir.path("m.gguf"));
    set_dimension(path, low, 2, 0);
    CHECK_CONTAINS(error_of(path), "tensor '" + low + "' has a dimension of 0");
}

TEST_CASE("a format that this version does not know is refused") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    moe_model().add_low(file);
    std::string expected;
    SUBCASE("a later version") {
        gguf_set_val_u32(file.keys(), "hobbit.version", 5);
        expected = "is of hobbit format version 5, this program reads version";
    }
    SUBCASE("no version") {
        gguf_remove_key(file.keys(), "hobbit.version");
        expected = "is of hobbit format version 0";
    }
    SUBCASE("other tiers") {
        file.set_strings("hobbit.tiers", { "high", "middle", "low" });
        expected = "declares other tiers than high and low";
    }
    SUBCASE("a version with residual tiers, which was never released") {
        gguf_set_val_u32(file.keys(), "hobbit.version", 2);
        expected = "is of hobbit format version 2, this program reads version";
    }
    SUBCASE("another kind of low tier") {
        gguf_set_val_str(file.keys(), "hobbit.tier.low.kind", "partial");
        expected = "hobbit.tier.low.kind is 'partial', and with format version 1 it is 'complete'";
    }
    CHECK_CONTAINS(error_of(file.write(dir.path("m.gguf"))), expected);
}

TEST_CASE("counts that end llama.cpp's process are an error") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    SUBCASE("more experts used than there are") {
        gguf_set_val_u32(file.keys(), "test.expert_used_count", 5);
    }
    SUBCASE("no expert is used") {
        gguf_set_val_u32(file.keys(), "test.expert_used_count", 0);
    }
    SUBCASE("no number of used experts") {
        gguf_remove_key(file.keys(), "test.expert_used_count");
    }
    SUBCASE("no experts") {
        gguf_remove_key(file.keys(), "test.expert_count");
    }
    SUBCASE("no layers") {
        gguf_set_val_u32(file.keys(), "test.block_count", 0);
    }
    SUBCASE("an epsilon that is NaN") {
        gguf_set_val_f32(file.keys(), "test.attention.layer_norm_rms_epsilon", NAN);
    }
    CHECK_CONTAINS(error_of(file.write(dir.path("m.gguf"))), "is damaged: its header has");
}

TEST_CASE("more layers or experts than llama.cpp runs are an error that names the limit") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    SUBCASE("experts") {
        gguf_set_val_u32(file.keys(), "test.expert_count", 1025);
    }
    SUBCASE("layers") {
        gguf_set_val_u32(file.keys(), "test.block_count", 513);
    }
    const std::string error = error_of(file.write(dir.path("m.gguf")));
    CHECK_CONTAINS(error, "runs at most 512 layers of 1024 experts");
    CHECK(error.find("damaged") == std::string::npos);
}

TEST_CASE("tiers that are not declared are an error, not a plain model") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    moe_model().add_low(file);
    gguf_remove_key(file.keys(), "hobbit.tiers");
    SUBCASE("with a version") {}
    SUBCASE("with tensors alone") {
        gguf_remove_key(file.keys(), "hobbit.version");
    }
    CHECK_CONTAINS(error_of(file.write(dir.path("m.gguf"))), "has tiers but does not declare them in hobbit.tiers");
}
