// SPDX-License-Identifier: MIT
#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "model/expert-index.h"

#include <doctest/doctest.h>
#include <filesystem>
#include <vector>

using namespace hobbit;

// An index of 2 layers of 4 experts, of which a token uses n_used of each layer.
static expert_index counted(const std::vector<int32_t> & uses, const std::vector<uint32_t> & n_used = { 2, 2 }) {
    const temp_dir dir;
    gguf_builder   file;
    moe_model().add_high(file);
    const std::string path = file.write(dir.path("m.gguf"));
    gguf_builder      calibration;
    gguf_set_val_u64(calibration.keys(), "hobbit.model_bytes", std::filesystem::file_size(path));
    calibration.set_ints("hobbit.expert_uses", uses);
    calibration.write(dir.path("m.calibration.gguf"));
    expert_index index;
    REQUIRE(index.open(path, "").ok());
    REQUIRE(index.read_calibration(path).ok());
    index.set_experts_used(n_used.data(), n_used.size());
    return index;
}

TEST_CASE("rates are uses per token, in each layer by itself") {
    CHECK(use_rates(counted({ 0, 0, 0, 0, 0, 0, 0, 0 })).empty());
    const expert_table<float> rates = use_rates(counted({ 2, 1, 1, 0, 0, 1, 0, 1 })); // two tokens and one
    CHECK(rates[{ 0, 0 }] == 1.0f);
    CHECK(rates[{ 0, 1 }] == 0.5f);
    CHECK(rates[{ 0, 3 }] == 0.0f);
    CHECK(rates[{ 1, 3 }] == 1.0f);
    CHECK(use_rates(counted({ 1, 1, 0, 0, 0, 0, 0, 0 }))[{ 1, 0 }] == 0.0f);
}

TEST_CASE("rates are of each layer's own number of experts") {
    const expert_table<float> rates = use_rates(counted({ 2, 1, 1, 0, 0, 1, 0, 1 }, { 2, 1 }));
    CHECK(rates[{ 0, 0 }] == 1.0f);
    CHECK(rates[{ 0, 1 }] == 0.5f);
    CHECK(rates[{ 1, 3 }] == 0.5f);
}

TEST_CASE("the most used experts come first, those never used not at all") {
    CHECK(most_used({}).empty());
    const std::vector<expert_id> expected = { { 0, 0 }, { 1, 1 }, { 1, 3 }, { 0, 1 }, { 0, 2 } };
    CHECK(most_used(use_rates(counted({ 2, 1, 1, 0, 0, 1, 0, 1 }))) == expected);
}
