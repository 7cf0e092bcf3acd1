// SPDX-License-Identifier: MIT
//
// Damaged headers: opening gives an index whose ranges lie within their files, or an error; never a crash.
#include "model/expert-index.h"

#include "fixtures/gguf-builder.h"
#include "fixtures/temp-dir.h"
#include "ggml.h"

#include <algorithm>
#include <doctest/doctest.h>
#include <random>
#include <string>

using namespace hobbit;

// A two-tier model with every kind of key: groups, thresholds, an alignment.
static std::string make_model(const temp_dir & dir) {
    gguf_builder file(64);
    add_grouped_model(file);
    return file.write(dir.path("model.gguf"));
}

// The same of a high tier that lacks experts.
static std::string make_partial(const temp_dir & dir) {
    gguf_builder file(64);
    moe_model    model;
    model.n_layers = 1;
    model.add_low_and_partial(file, { { 1, 3 } });
    return file.write(dir.path("partial.gguf"));
}

static bool is_sound(const expert_index & index, uint64_t file_size) {
    for (const tier_id tier : index.tiers()) {
        for (layer_id layer = 0; layer < index.n_layers(); layer++) {
            const layer_shape & shape = index.layer(layer);
            for (const part_id part : shape.parts) {
                for (uint32_t e = 0; e < shape.n_experts; e++) {
                    if (!index.has(tier, { layer, e })) {
                        continue;
                    }
                    const part_location & at = index.locate(tier, layer, part, e);
                    const matrix_shape &  m  = shape.shapes[part];
                    if (at.offset > file_size || at.size > file_size - at.offset ||
                        at.size != ggml_row_size(at.type, m.n_in) * uint64_t(m.n_out)) {
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

// Keeps the reader's complaints about thousands of files off the screen.
static void log_nothing(ggml_log_level, const char *, void *) {}

struct outcome {
    size_t opened  = 0;
    size_t refused = 0;
    size_t unsound = 0;
};

static void try_to_open(const temp_dir & dir, const std::string & bytes, outcome & result) {
    expert_index index;
    if (!index.open(dir.write("damaged.gguf", bytes), "").ok()) {
        result.refused++;
    } else if (is_sound(index, bytes.size())) {
        result.opened++;
    } else {
        result.unsound++;
    }
}

TEST_CASE("damaged headers are refused or harmless") {
    ggml_log_set(log_nothing, nullptr);
    temp_dir    dir;
    std::string path;
    SUBCASE("of two complete tiers") {
        path = make_model(dir);
    }
    SUBCASE("of a high tier that lacks experts") {
        path = make_partial(dir);
    }
    const std::string good = temp_dir::read(path);
    gguf_file         file;
    REQUIRE(file.open(path).ok());
    const size_t header = file.tensors()[0].offset;
    REQUIRE(header > 500);

    std::mt19937 random(20240603);
    const char   telling[] = { 0, 1, 2, 4, 8, 9, 32, 127, char(128), char(255) };
    outcome      flipped;
    for (int i = 0; i < 2500; i++) {
        std::string bytes = good;
        for (uint32_t n = 1 + random() % 3; n > 0; n--) {
            char & byte = bytes[random() % header];
            byte        = random() % 2 ? telling[random() % sizeof(telling)] : char(random());
        }
        try_to_open(dir, bytes, flipped);
    }
    CHECK(flipped.unsound == 0);
    CHECK(flipped.refused > 0);
    CHECK(flipped.opened > 0); // a changed letter in a key that nobody reads

    outcome cut;
    for (size_t size = 0; size < good.size(); size += size < header ? 3 : 997) {
        try_to_open(dir, good.substr(0, size), cut);
    }
    CHECK(cut.opened == 0);
    CHECK(cut.unsound == 0);

    outcome whole;
    try_to_open(dir, good, whole);
    CHECK(whole.opened == 1);
    ggml_log_set(nullptr, nullptr);
}
