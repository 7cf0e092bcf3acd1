// SPDX-License-Identifier: MIT
#pragma once

#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

// A GGUF file with random weights that depend on the tensors' names alone.
class gguf_builder {
  public:
    explicit gguf_builder(uint32_t alignment = GGUF_DEFAULT_ALIGNMENT) :
        gguf_(alignment == GGUF_DEFAULT_ALIGNMENT ? gguf_init_empty() : init_aligned(alignment)),
        ctx_(ggml_init({ 1 << 20, nullptr, /* .no_alloc = */ true })) {}

    ~gguf_builder() {
        gguf_free(gguf_);
        ggml_free(ctx_);
    }

    gguf_builder(const gguf_builder &)             = delete;
    gguf_builder & operator=(const gguf_builder &) = delete;

    // For gguf_set_val_* and gguf_set_arr_*.
    gguf_context * keys() { return gguf_; }

    void set_strings(const std::string & key, const std::vector<const char *> & values) {
        gguf_set_arr_str(gguf_, key.c_str(), const_cast<const char **>(values.data()), values.size());
    }

    void set_ints(const std::string & key, const std::vector<int32_t> & values) {
        gguf_set_arr_data(gguf_, key.c_str(), GGUF_TYPE_INT32, values.data(), values.size());
    }

    void add(const std::string & name, ggml_type type, int64_t n_in, int64_t n_out, int64_t n_experts) {
        ggml_tensor *      t     = ggml_new_tensor_3d(ctx_, type, n_in, n_out, n_experts);
        std::string &      bytes = data_[name];
        std::vector<float> values(size_t(n_in * n_out * n_experts));
        std::seed_seq      seed(name.begin(), name.end());
        std::mt19937       random(seed);
        for (float & value : values) {
            value = float(random()) / float(random.max()) * 2.0f - 1.0f;
        }
        bytes.resize(ggml_nbytes(t));
        if (!values.empty()) {
            ggml_quantize_chunk(type, values.data(), bytes.data(), 0, n_out * n_experts, n_in, nullptr);
        }
        ggml_set_name(t, name.c_str());
        t->data = bytes.data();
        gguf_add_tensor(gguf_, t);
    }

    // The tensor's bytes as the file has them.
    const std::string & data(const std::string & name) const { return data_.at(name); }

    std::string write(const std::string & path) const {
        if (!gguf_write_to_file(gguf_, path.c_str(), /* only_meta = */ false)) {
            throw std::runtime_error("cannot write " + path);
        }
        return path;
    }

  private:
    // ggml writes at the alignment that it has read, not at the one that was set: reads a file of nothing but the key.
    static gguf_context * init_aligned(uint32_t alignment) {
        const auto little_endian = [](uint64_t value, size_t size) {
            std::string bytes;
            for (size_t i = 0; i < size; i++) {
                bytes += char(value >> (8 * i));
            }
            return bytes;
        };
        const std::string key    = "general.alignment";
        std::string       header = "GGUF" + little_endian(3, 4) + little_endian(0, 8) + little_endian(1, 8);
        header += little_endian(key.size(), 8) + key + little_endian(GGUF_TYPE_UINT32, 4) + little_endian(alignment, 4);
        return gguf_init_from_buffer(header.data(), header.size(), { /* .no_alloc = */ true, /* .ctx = */ nullptr });
    }

    gguf_context *                     gguf_;
    ggml_context *                     ctx_;
    std::map<std::string, std::string> data_; // [name]
};

// The routed experts of a small model, and the keys that belong to them.
struct moe_model {
    uint32_t  n_layers    = 2;
    uint32_t  first_block = 0; // as if the layers before were dense
    int64_t   n_experts   = 4;
    uint32_t  n_used      = 2;
    int64_t   n_embd      = 64;
    int64_t   n_ff        = 32;
    bool      fused       = false; // gate and up in one tensor
    bool      apart       = false; // something is computed between gate and up
    ggml_type high        = GGML_TYPE_F16;
    ggml_type low         = GGML_TYPE_Q4_0;

    static std::string name(uint32_t block, const std::string & part, const std::string & suffix = "") {
        return "blk." + std::to_string(block) + ".ffn_" + part + "_exps" + suffix + ".weight";
    }

    void add_tensors(gguf_builder & file, ggml_type type, const std::string & suffix) const {
        for (uint32_t block = first_block; block < first_block + n_layers; block++) {
            if (fused) {
                file.add(name(block, "gate_up", suffix), type, n_embd, 2 * n_ff, n_experts);
            } else {
                file.add(name(block, "gate", suffix), type, n_embd, n_ff, n_experts);
                file.add(name(block, "up", suffix), type, n_embd, n_ff, n_experts);
            }
            file.add(name(block, "down", suffix), type, n_ff, n_embd, n_experts);
        }
    }

    void add_high(gguf_builder & file) const {
        gguf_set_val_str(file.keys(), "general.architecture", "test");
        gguf_set_val_u32(file.keys(), "test.expert_used_count", n_used);
        add_tensors(file, high, "");
    }

    static void declare_tiers(gguf_builder & file) {
        gguf_set_val_u32(file.keys(), "hobbit.version", 1);
        file.set_strings("hobbit.tiers", { "high", "low" });
        gguf_set_val_str(file.keys(), "hobbit.tier.high.kind", "complete");
        gguf_set_val_str(file.keys(), "hobbit.tier.low.kind", "complete");
    }

    void add_low(gguf_builder & file) const {
        declare_tiers(file);
        add_tensors(file, low, ".low.0");
    }

    // The high tier as a residual; `base` is the tier under llama.cpp's names.
    static void declare_residual(gguf_builder & file, const char * base = "low") {
        declare_tiers(file);
        gguf_set_val_u32(file.keys(), "hobbit.version", 2);
        gguf_set_val_str(file.keys(), "hobbit.tier.high.kind", "residual");
        gguf_set_val_str(file.keys(), "hobbit.tier.high.of", "low");
        gguf_set_val_str(file.keys(), "hobbit.base_tier", base);
    }

    // A whole file: the low tier and its residual, in the types `low` and `high`.
    void add_low_and_residual(gguf_builder & file) const {
        gguf_set_val_str(file.keys(), "general.architecture", "test");
        gguf_set_val_u32(file.keys(), "test.expert_used_count", n_used);
        declare_residual(file);
        add_tensors(file, low, "");
        add_tensors(file, high, ".high.0");
    }
};

// A low tier for the layer of a moe_model of its default sizes: gate and up in two groups of types of their own.
inline void add_grouped_low(gguf_builder & file) {
    for (const char * part : { "gate", "up" }) {
        const std::string stem = std::string("blk.0.ffn_") + part + "_exps";
        file.add(stem + ".low.0.weight", GGML_TYPE_Q8_0, 64, 32, 1);
        file.set_ints("hobbit.tier.low." + stem + ".0.experts", { 2 });
        file.add(stem + ".low.1.weight", GGML_TYPE_Q4_0, 64, 32, 3);
        file.set_ints("hobbit.tier.low." + stem + ".1.experts", { 3, 0, 1 });
    }
    file.add("blk.0.ffn_down_exps.low.0.weight", GGML_TYPE_Q4_0, 32, 64, 4);
}
