// SPDX-License-Identifier: MIT
//
// Files whose high tier is a residual; sidecars are in test-sidecar.cpp.
#include "fixtures/check-contains.h"
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "model/expert-index.h"

#include <doctest/doctest.h>
#include <functional>
#include <string>

using namespace hobbit;

static moe_model quantized() {
    moe_model m;
    m.high = GGML_TYPE_Q5_0;
    return m;
}

TEST_CASE("the low tier lies under llama.cpp's names, the residual beside it") {
    temp_dir     dir;
    gguf_builder file;
    quantized().add_low_and_residual(file);
    expert_index index;
    const status s = index.open(file.write(dir.path("m.gguf")), "");
    REQUIRE_MESSAGE(s.ok(), s.message());
    CHECK(index.n_tiers() == 2);
    CHECK(index.kind(tier_id::high) == tier_kind::residual);
    CHECK(index.terms(tier_id::high) == std::vector<term_id>{ term_id::low, term_id::high });
    CHECK(index.terms(tier_id::low) == std::vector<term_id>{ term_id::low });
    // 18 and 22 bytes for 32 weights, 2 layers x 3 parts x 4 experts x 64 x 32
    CHECK(index.term_bytes(term_id::low) == 27648);
    CHECK(index.term_bytes(term_id::high) == 33792);
    const auto bytes_at = [&](term_id term, uint32_t expert) {
        const part_location & at = index.locate(term, 1, part_id::down, expert);
        return temp_dir::read(index.files()[at.file]).substr(at.offset, at.size);
    };
    for (uint32_t e = 0; e < 4; e++) {
        const std::string & low      = file.data("blk.1.ffn_down_exps.weight");
        const std::string & residual = file.data("blk.1.ffn_down_exps.high.0.weight");
        CHECK(bytes_at(term_id::low, e) == low.substr(e * low.size() / 4, low.size() / 4));
        CHECK(bytes_at(term_id::high, e) == residual.substr(e * residual.size() / 4, residual.size() / 4));
    }
}

TEST_CASE("complete tiers are their own terms") {
    temp_dir     dir;
    gguf_builder file;
    moe_model().add_high(file);
    moe_model().add_low(file);
    expert_index index;
    REQUIRE(index.open(file.write(dir.path("m.gguf")), "").ok());
    CHECK(index.kind(tier_id::high) == tier_kind::complete);
    CHECK(index.terms(tier_id::high) == std::vector<term_id>{ term_id::high });
    CHECK(index.terms(tier_id::low) == std::vector<term_id>{ term_id::low });
}

static std::string refused(const std::function<void(gguf_builder &)> & change) {
    temp_dir     dir;
    gguf_builder file;
    quantized().add_low_and_residual(file);
    change(file);
    expert_index index;
    return index.open(file.write(dir.path("m.gguf")), "").message();
}

static std::string refused_with(const char * key, const char * value) {
    return refused([&](gguf_builder & file) { gguf_set_val_str(file.keys(), key, value); });
}

TEST_CASE("a residual tier that cannot be is refused") {
    CHECK_CONTAINS(refused_with("hobbit.tier.high.of", "high"), "the high tier is the residual of 'high', which is no");
    CHECK_CONTAINS(refused_with("hobbit.tier.high.of", "middle"), "the high tier is the residual of 'middle', which");
    CHECK_CONTAINS(refused([](auto & f) { gguf_remove_key(f.keys(), "hobbit.tier.high.of"); }), "the residual of ''");
    CHECK_CONTAINS(refused_with("hobbit.base_tier", "high"), "hobbit.base_tier is 'high', with a residual tier it is");
    CHECK_CONTAINS(refused([](auto & f) { gguf_remove_key(f.keys(), "hobbit.base_tier"); }), "base_tier is ''");
    CHECK_CONTAINS(refused_with("hobbit.tier.low.kind", "residual"), "the low tier is of kind 'residual'");
    CHECK_CONTAINS(refused_with("hobbit.tier.high.kind", "complete"), "of kind 'complete', which format version 2");
    CHECK_CONTAINS(refused_with("hobbit.tier.high.kind", "delta"), "of kind 'delta', which format version 2 does not");
    CHECK_CONTAINS(refused([](auto & f) { gguf_set_val_u32(f.keys(), "hobbit.version", 1); }),
                   "the high tier is of kind 'residual', which format version 1 does not have");
    CHECK_CONTAINS(refused([](auto & f) { gguf_set_val_u32(f.keys(), "hobbit.version", 3); }),
                   "the high tier is of kind 'residual', which format version 3 does not have");
    CHECK_CONTAINS(refused([](auto & f) { gguf_set_val_u32(f.keys(), "hobbit.version", 4); }),
                   "is of hobbit format version 4, this program reads versions 1 to 3");
}

TEST_CASE("tensors that do not fit together are refused") {
    const auto with = [](const std::string & name, int64_t n_in, int64_t n_out, int64_t n_experts) {
        return refused([&](gguf_builder & file) { file.add(name, GGML_TYPE_Q5_0, n_in, n_out, n_experts); });
    };
    CHECK_CONTAINS(with("blk.0.ffn_up_exps.low.0.weight", 64, 32, 4),
                   "belongs to no expert tensor of the model, or to");
    CHECK_CONTAINS(with("blk.7.ffn_up_exps.high.0.weight", 64, 32, 4), "belongs to no expert tensor of the model");
    CHECK_CONTAINS(with("blk.0.ffn_up_exps.high.1.weight", 64, 32, 4), "repeats expert 0");
    CHECK_CONTAINS(with("blk.0.ffn_up_exps.high.1.weight", 32, 32, 4),
                   "has shape 32 x 32 x 4, the model asks for 64 x");
    CHECK_CONTAINS(with("blk.0.ffn_up_exps.high.1.weight", 64, 32, 3),
                   "has shape 64 x 32 x 3, the model asks for 64 x");
}

TEST_CASE("a residual tier that lacks experts is refused") {
    temp_dir     dir;
    gguf_builder file;
    moe_model    m = quantized();
    m.add_high(file);
    moe_model::declare_residual(file);
    m.n_layers = 1;
    m.add_tensors(file, GGML_TYPE_Q5_0, ".high.0");
    expert_index index;
    CHECK_CONTAINS(index.open(file.write(dir.path("m.gguf")), "").message(),
                   "the high tier lacks expert 0 of blk.1.ffn_gate_exps");
}

TEST_CASE("a calibration of another residual tier is refused") {
    temp_dir     dir;
    gguf_builder file;
    quantized().add_low_and_residual(file);
    const std::string path = file.write(dir.path("m.gguf"));
    expert_index      index;
    REQUIRE(index.open(path, "").ok());
    for (const uint64_t high_bytes : { index.term_bytes(term_id::high), uint64_t(5) }) {
        gguf_builder calibration;
        gguf_set_val_u64(calibration.keys(), "hobbit.model_bytes", index.model_bytes());
        gguf_set_val_u64(calibration.keys(), "hobbit.low_bytes", index.term_bytes(term_id::low));
        gguf_set_val_u64(calibration.keys(), "hobbit.high_bytes", high_bytes);
        calibration.write(dir.path("m.calibration.gguf"));
        const std::string message = index.read_calibration(path).message();
        CHECK(message.empty() == (high_bytes != 5));
        CHECK((message.empty() || message.find("made for another high tier") != std::string::npos));
    }
}
