// SPDX-License-Identifier: MIT
#pragma once

#include "gguf-builder.h"
#include "hobbit.h"
#include "temp-dir.h"

#include <cstdlib>
#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <string>
#include <vector>

// Models opened through hobbit.h.

inline hobbit_setting integer(const char * key, int64_t value) {
    return { key, HOBBIT_SETTING_INT, value, 0.0, nullptr };
}

inline hobbit_setting number(const char * key, double value) {
    return { key, HOBBIT_SETTING_FLOAT, 0, value, nullptr };
}

// Borrows the value.
inline hobbit_setting text(const char * key, const std::string & value) {
    return { key, HOBBIT_SETTING_STRING, 0, 0.0, value.c_str() };
}

struct unref_model {
    void operator()(hobbit_model * model) const { hobbit_unref(model); }
};

using model_ptr = std::unique_ptr<hobbit_model, unref_model>;

// Before its layers are placed.
inline model_ptr opened_file(const std::string & path, const std::vector<hobbit_setting> & settings) {
    char           err[512] = "";
    hobbit_model * model    = nullptr;
    const bool     ok       = hobbit_open(path.c_str(), settings.data(), settings.size(), &model, err, sizeof(err));
    CHECK_MESSAGE(ok, err);
    return model_ptr(model);
}

// `devices`: of the layers.
inline model_ptr opened(const std::string & path, const std::vector<hobbit_setting> & settings,
                        const std::vector<ggml_backend_device *> & devices = {}) {
    char      err[512] = "";
    model_ptr model    = opened_file(path, settings);
    CHECK_MESSAGE((!model || hobbit_place_layers(model.get(), devices.data(), devices.size(), err, sizeof(err))), err);
    return model;
}

inline std::string refused(const std::string & path, const std::vector<hobbit_setting> & settings) {
    char           err[512] = "";
    int            nothing;
    hobbit_model * model = reinterpret_cast<hobbit_model *>(&nothing); // must be reset
    CHECK_FALSE(hobbit_open(path.c_str(), settings.data(), settings.size(), &model, err, sizeof(err)));
    CHECK(model == nullptr);
    return err;
}

// What the error names when the model's pools are too small to be prepared.
inline int64_t smallest_pools_named(const model_ptr & model) {
    char err[512] = "";
    CHECK_FALSE(hobbit_prepare(model.get(), 0, 1, err, sizeof(err)));
    const std::string words = "the smallest that work are ";
    const char *      at    = std::strstr(err, words.c_str());
    REQUIRE_MESSAGE(at != nullptr, err);
    return std::atoll(at + words.size());
}

// Files of the kinds that are opened.
struct files {
    temp_dir     dir;
    gguf_builder plain;
    gguf_builder tiers;
    std::string  plain_path;
    std::string  tiers_path;
    std::string  dense_path;

    files() {
        moe_model().add_high(plain);
        moe_model().add_high(tiers);
        moe_model().add_low(tiers);
        gguf_builder dense;
        dense.add("blk.0.ffn_up.weight", GGML_TYPE_F16, 64, 32, 1);
        plain_path = plain.write(dir.path("plain.gguf"));
        tiers_path = tiers.write(dir.path("tiers.gguf"));
        dense_path = dense.write(dir.path("dense.gguf"));
    }
};
