// SPDX-License-Identifier: MIT
#include "model/sidecar.h"

#include "fixtures/check-contains.h"
#include "fixtures/fingerprint.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "model/expert-index.h"

#include <doctest/doctest.h>
#include <functional>
#include <string>
#include <vector>

using namespace hobbit;

// A model of two layers in m.gguf, and the sidecar that belongs to it, not yet written.
struct model_and_sidecar {
    temp_dir     dir;
    gguf_builder base;
    gguf_builder sidecar{ 4096 };
    std::string  path;

    model_and_sidecar() : model_and_sidecar([](gguf_builder & file) { moe_model().add_low(file); }) {}

    // `add` adds to the sidecar.
    explicit model_and_sidecar(const std::function<void(gguf_builder &)> & add) {
        moe_model().add_high(base);
        path = base.write(dir.path("m.gguf"));
        describe(std::filesystem::file_size(path));
        add(sidecar);
    }

    void describe(uint64_t base_size) {
        gguf_set_val_str(sidecar.keys(), "general.architecture", "hobbit-sidecar");
        gguf_set_val_bool(sidecar.keys(), "hobbit.sidecar", true);
        gguf_set_val_str(sidecar.keys(), "hobbit.sidecar.base_name", "m.gguf");
        gguf_set_val_u64(sidecar.keys(), "hobbit.sidecar.base_size", base_size);
        gguf_set_val_u64(sidecar.keys(), "hobbit.sidecar.base_fingerprint", fingerprint(tensors_of(base, 2)));
    }
};

TEST_CASE("a sidecar of the default name is found and used") {
    model_and_sidecar files;
    gguf_set_val_f32(files.sidecar.keys(), "hobbit.t1", 0.5f);
    const std::string sidecar = files.sidecar.write(files.dir.path("m.hobbit.gguf"));
    expert_index      index({ "hobbit.t1" });
    const status      s = index.open(files.path, "");
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(index.n_tiers() == 2);
    CHECK(index.stored() == stored_settings{ { "hobbit.t1", 0.5 } });
    CHECK(index.files() == std::vector<std::string>{ files.path, sidecar });
    CHECK(index.n_experts_used() == 2); // the base's, not the sidecar's
    CHECK(index.model_bytes() == std::filesystem::file_size(files.path));

    const part_location & at = index.locate(tier_id::low, 1, part_id::up, 0);
    CHECK(at.file == 1);
    const std::string & data = files.sidecar.data("blk.1.ffn_up_exps.low.0.weight");
    CHECK(temp_dir::read(sidecar).substr(at.offset, at.size) == data.substr(0, data.size() / 4));
}

TEST_CASE("without a sidecar a plain model has one tier") {
    model_and_sidecar files;
    expert_index      index;
    REQUIRE(index.open(files.path, "").ok());
    CHECK(index.n_tiers() == 1);
}

TEST_CASE("a sidecar of any name may be given") {
    model_and_sidecar files;
    const std::string sidecar = files.sidecar.write(files.dir.path("elsewhere.gguf"));
    expert_index      index;
    REQUIRE(index.open(files.path, sidecar).ok());
    CHECK(index.n_tiers() == 2);
}

TEST_CASE("the base may be renamed together with its sidecar") {
    model_and_sidecar files;
    files.sidecar.write(files.dir.path("n.hobbit.gguf"));
    std::filesystem::rename(files.path, files.dir.path("n.gguf"));
    expert_index index;
    REQUIRE(index.open(files.dir.path("n.gguf"), "").ok());
    CHECK(index.n_tiers() == 2);
}

TEST_CASE("a split model has one sidecar, which knows the size of all parts") {
    model_and_sidecar files;
    gguf_builder      first;
    gguf_builder      second;
    moe_model         model;
    gguf_set_val_u16(first.keys(), "split.count", 2);
    gguf_set_val_u16(second.keys(), "split.no", 1);
    model.n_layers = 1;
    model.add_high(first);
    model.first_block = 1;
    model.add_tensors(second, GGML_TYPE_F16, "");
    const std::string path = first.write(files.dir.path("s-00001-of-00002.gguf"));
    const std::string rest = second.write(files.dir.path("s-00002-of-00002.gguf"));
    // the weights depend on their names alone: the fingerprint is that of the single file
    files.describe(std::filesystem::file_size(path) + std::filesystem::file_size(rest));
    files.sidecar.write(files.dir.path("s.hobbit.gguf"));

    expert_index index;
    const status s = index.open(path, "");
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(index.n_tiers() == 2);
    CHECK(index.locate(tier_id::low, 1, part_id::up, 0).file == 2);
}

TEST_CASE("tensors shorter than 64 bytes are hashed whole") {
    temp_dir                        dir;
    gguf_builder                    base;
    gguf_builder                    sidecar;
    const std::string               up    = "blk.0.ffn_up_exps.weight";
    const std::string               down  = "blk.0.ffn_down_exps.weight";
    const std::vector<std::string>  names = { up, down };
    std::vector<fingerprint_tensor> tensors;
    for (const std::string & name : names) {
        base.add(name, GGML_TYPE_F32, 4, 2, 1); // 32 bytes
        sidecar.add(name.substr(0, name.size() - 6) + "low.0.weight", GGML_TYPE_F16, 4, 2, 1);
        tensors.push_back({ name, "f32|4,2,1", base.data(name) });
    }
    const std::string path = base.write(dir.path("m.gguf"));
    moe_model::declare_tiers(sidecar);
    gguf_set_val_bool(sidecar.keys(), "hobbit.sidecar", true);
    gguf_set_val_u64(sidecar.keys(), "hobbit.sidecar.base_size", std::filesystem::file_size(path));
    gguf_set_val_u64(sidecar.keys(), "hobbit.sidecar.base_fingerprint", fingerprint(tensors));
    sidecar.write(dir.path("m.hobbit.gguf"));
    expert_index index;
    const status s = index.open(path, "");
    CHECK_MESSAGE(s.ok(), s.message());
}

TEST_CASE("a sidecar that does not belong to the model is refused") {
    model_and_sidecar files;
    std::string       sidecar  = files.dir.path("m.hobbit.gguf");
    std::string       expected = "was made for another version of";
    SUBCASE("another size") {
        gguf_set_val_u64(files.sidecar.keys(), "hobbit.sidecar.base_size", 1);
        files.sidecar.write(sidecar);
    }
    SUBCASE("other weights") {
        gguf_set_val_u64(files.sidecar.keys(), "hobbit.sidecar.base_fingerprint", 1);
        files.sidecar.write(sidecar);
    }
    SUBCASE("no sidecar at all, under its name") {
        gguf_set_val_bool(files.sidecar.keys(), "hobbit.sidecar", false);
        files.sidecar.write(sidecar);
        expected = "is not a sidecar: make one with pyhobbit convert --sidecar";
    }
    SUBCASE("missing, though given") {
        sidecar  = files.dir.path("nowhere.gguf");
        expected = "cannot open";
    }
    SUBCASE("damaged") {
        files.dir.write("m.hobbit.gguf", "GGUF");
        expected = "ends in the middle of its header";
    }
    expert_index index;
    const status s = index.open(files.path, sidecar);
    CHECK_CONTAINS(s.message(), expected);
    CHECK_CONTAINS(s.message(), sidecar);
}

TEST_CASE("one changed byte at the start of an expert tensor is noticed") {
    model_and_sidecar files;
    files.sidecar.write(files.dir.path("m.hobbit.gguf"));
    gguf_file base;
    REQUIRE(base.open(files.path).ok());
    std::string bytes                         = temp_dir::read(files.path);
    bytes[base.tensors().back().offset + 63] ^= 1;
    files.dir.write("m.gguf", bytes);
    expert_index index;
    CHECK_CONTAINS(index.open(files.path, "").message(), "was made for another version of");
}

TEST_CASE("a file with tiers of its own takes no sidecar") {
    model_and_sidecar files;
    gguf_builder      tiers;
    moe_model().add_high(tiers);
    moe_model().add_low(tiers);
    const std::string path = tiers.write(files.dir.path("t.gguf"));
    files.sidecar.write(files.dir.path("t.hobbit.gguf"));
    expert_index by_default;
    CHECK(by_default.open(path, "").ok()); // the file beside it is not looked at
    CHECK(by_default.files().size() == 1);
    expert_index given;
    CHECK_CONTAINS(given.open(path, files.dir.path("t.hobbit.gguf")).message(), "do not give it a sidecar");
}

TEST_CASE("a sidecar is no model") {
    model_and_sidecar files;
    const std::string sidecar = files.sidecar.write(files.dir.path("m.hobbit.gguf"));
    expert_index      index;
    CHECK_CONTAINS(index.open(sidecar, "").message(),
                   "holds only further tiers of 'm.gguf': give that file as the model");
}

TEST_CASE("the default name") {
    CHECK(beside_model("/a/model.gguf", ".hobbit.gguf") == "/a/model.hobbit.gguf");
    CHECK(beside_model("/a/model-00001-of-00003.gguf", ".hobbit.gguf") == "/a/model.hobbit.gguf");
    CHECK(beside_model("/a/model-00001-of-3.gguf", ".hobbit.gguf") == "/a/model-00001-of-3.hobbit.gguf");
    CHECK(beside_model("-00001-of-00003.gguf", ".hobbit.gguf") == ".hobbit.gguf");
    CHECK(beside_model("x", ".hobbit.gguf") == "x.hobbit.gguf");
    CHECK(beside_model("/a.gguf/model", ".hobbit.gguf") == "/a.gguf/model.hobbit.gguf");
}
