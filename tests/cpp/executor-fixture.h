// SPDX-License-Identifier: MIT
#pragma once

#include "file-reader.h"
#include "ggml-cpu.h"
#include "layer-graph.h"
#include "moe-executor.h"
#include "temp-dir.h"

#include <doctest/doctest.h>
#include <functional>
#include <memory>
#include <string>

using namespace hobbit;

// Fails from a given read on, counted from 0.
class failing_reader final : public file_reader {
  public:
    posix_file_reader                     files;
    std::atomic<int>                      reads_left{ 1 << 30 };
    std::function<void(uint64_t, size_t)> before; // a read of so many bytes there; from several threads

    status read_at(uint32_t file, uint64_t offset, size_t size, size_t needed, void * buf) override {
        if (before) {
            before(offset, size);
        }
        return reads_left-- > 0 ? files.read_at(file, offset, size, needed, buf) : status::error("the disk is gone");
    }
};

// A model of 8 experts of which 2 are used, on disk and opened.
struct model_on_disk {
    moe_model    shape;
    temp_dir     dir;
    gguf_builder file;
    expert_index index;

    explicit model_on_disk(const moe_model & m = small()) : shape(m) {
        shape.add_high(file);
        shape.add_low(file);
        open();
    }

    model_on_disk(const moe_model & m, const std::function<void(gguf_builder &)> & add) : shape(m) {
        add(file);
        open();
    }

    // With a high tier that is a residual.
    static model_on_disk with_residual(const moe_model & m = small()) {
        return { m, [&](gguf_builder & file) { m.add_low_and_residual(file); } };
    }

    // One layer, whose low tier has experts of two types.
    static model_on_disk with_mixed_types(ggml_type first = GGML_TYPE_Q8_0, ggml_type second = GGML_TYPE_Q4_1) {
        const moe_model m = small();
        return { m, [&](gguf_builder & file) {
                    moe_model one_layer = m;
                    one_layer.n_layers  = 1;
                    one_layer.add_high(file);
                    moe_model::declare_tiers(file);
                    for (const std::string part : { "gate", "up", "down" }) {
                        const std::string stem  = "blk.0.ffn_" + part + "_exps";
                        const bool        down  = part == "down";
                        const int64_t     n_in  = down ? m.n_ff : m.n_embd;
                        const int64_t     n_out = down ? m.n_embd : m.n_ff;
                        file.add(stem + ".low.0.weight", first, n_in, n_out, 3);
                        file.set_ints("hobbit.tier.low." + stem + ".0.experts", { 6, 1, 4 });
                        file.add(stem + ".low.1.weight", second, n_in, n_out, 5);
                        file.set_ints("hobbit.tier.low." + stem + ".1.experts", { 0, 2, 3, 5, 7 });
                    }
                } };
    }

    void open() {
        const status s = index.open(file.write(dir.path("m.gguf")), "");
        REQUIRE_MESSAGE(s.ok(), s.message());
    }

    static moe_model small() {
        moe_model m;
        m.n_experts = 8;
        return m;
    }
};

// The cache over it, and what computes with it.
struct engine {
    failing_reader                reader;
    stats                         counters;
    stats                         host_counters;
    std::unique_ptr<cache_policy> policy;
    std::unique_ptr<loader>       l;
    std::unique_ptr<expert_cache> host; // below the cache; null: none
    expert_cache::pool_place      place;
    expert_cache                  cache;
    expert_kinds                  kinds;
    std::unique_ptr<cpu_share>    share; // null without a host cache
    moe_executor                  executor;
    compute_backend               compute_on;
    cpu_backend                   cpu;
    inner_graph                   inner{ compute_on.backend };
    inner_graph                   cpu_graph{ cpu.backend };

    engine(const model_on_disk & m, uint32_t n_high, uint32_t n_low, score_thresholds thresholds = {}) :
        engine(m, n_high, n_low, moe_executor::config{ { thresholds }, false }) {}

    // `host_slots` are of each tier that has a pool.
    engine(const model_on_disk & m, uint32_t n_high, uint32_t n_low, const moe_executor::config & config,
           const expert_cache::pool_place & where = {}, uint32_t host_slots = 0, compute_mode mode = compute_mode::gpu,
           ggml_backend_buffer_type_t host_memory = nullptr, double transfer_per_byte = 1e-9) :
        policy(make_lru(m)),
        l(std::make_unique<loader>(reader, counters, 2, std::vector{ where.device })),
        host(host_slots > 0 ? make_host(m, host_memory) : nullptr),
        place{ where.device, where.pack, host.get() },
        cache(m.index, *l, counters, place),
        kinds(m.index),
        share(host ? std::make_unique<cpu_share>(m.index, cache, *host, kinds, costs(mode, transfer_per_byte), counters)
                   : nullptr),
        executor(m.index, cache, *policy, nullptr, share.get(), config, counters),
        compute_on(where.device) {
        REQUIRE(reader.files.open(m.index.files()[0]).ok());
        const uint32_t slots[] = { n_high, n_low };
        for (uint32_t tier = 0; tier < TIER_COUNT; tier++) {
            if (slots[tier] > 0) {
                const status s = cache.allocate(tier, slots[tier], 1, *policy);
                REQUIRE_MESSAGE(s.ok(), s.message());
                REQUIRE((!host || host->allocate(tier, host_slots, 1, *policy).ok()));
            }
        }
    }

    std::unique_ptr<expert_cache> make_host(const model_on_disk & m, ggml_backend_buffer_type_t memory) {
        expert_cache::pool_place in_host;
        in_host.memory = memory;
        return std::make_unique<expert_cache>(m.index, *l, host_counters, in_host);
    }

    // To begin with, CPU and device are as fast.
    cost_model costs(compute_mode mode, double transfer_per_byte) const {
        std::vector<cost_model::kind_seed> seeds;
        for (const expert_kind & kind : kinds.all()) {
            seeds.push_back({ kind.bytes(), kind.down(), 1e-4, 1e-4, 1e-4, 0.0 });
        }
        return { seeds, transfer_per_byte, mode };
    }

    static std::unique_ptr<cache_policy> make_lru(const model_on_disk & m) {
        policy_options options;
        options.name      = "lru";
        options.n_layers  = uint32_t(m.index.n_layers());
        options.n_experts = m.index.n_experts();
        options.n_used    = 2;
        auto policy       = make_policy(options);
        policy->begin_sequence(0);
        return policy;
    }

    ~engine() { l.reset(); } // before the cache, whose memory its threads write into

    rows compute(const model_on_disk & m, const layer_input & input, uint32_t layer = 0, bool bias = false) {
        layer_graph graph(m.shape, input, bias, 1, ggml_backend_dev_buffer_type(place.device));
        graph.set_cached(m.index, layer);
        const status s = executor.compute(graph.graph, inner, &cpu_graph);
        CHECK_MESSAGE(s.ok(), s.message());
        return graph.output();
    }
};

// Each node of the layer in a graph of its own.
inline rows compute_node_by_node(engine & e, const model_on_disk & m, const layer_input & input, bool bias = false) {
    layer_graph graph(m.shape, input, bias, 1, ggml_backend_dev_buffer_type(e.place.device));
    graph.set_cached(m.index, 0);
    for (int i = 0; i < ggml_graph_n_nodes(graph.graph); i++) {
        ggml_cgraph  view = ggml_graph_view(graph.graph, i, i + 1);
        const status s    = e.executor.compute(&view, e.inner, &e.cpu_graph);
        CHECK_MESSAGE(s.ok(), s.message());
    }
    return graph.output();
}

// That an expert has there, and those behind them.
inline std::string device_bytes(const expert_cache & cache, expert_id id, uint32_t tier, uint32_t part, size_t size) {
    ggml_tensor tensor = {};
    tensor.type        = GGML_TYPE_I8;
    tensor.ne[0]       = int64_t(size);
    tensor.ne[1] = tensor.ne[2] = tensor.ne[3] = 1;
    tensor.nb[0]                               = 1;
    tensor.nb[1] = tensor.nb[2] = tensor.nb[3] = size;
    tensor.data                                = cache.data(id, tier, part);
    tensor.buffer                              = cache.buffer(id, tier, part);
    std::string bytes(size, '\0');
    ggml_backend_tensor_get(&tensor, bytes.data(), 0, size);
    return bytes;
}

// The layer with plain tensors that hold one of the tiers, or the sum of both.
inline rows stock(const model_on_disk & m, const layer_input & input, uint32_t tier, uint32_t layer = 0,
                  bool bias = false, ggml_backend_buffer_type_t buft = ggml_backend_cpu_buffer_type()) {
    const auto & terms = m.index.terms(tier);
    layer_graph  graph(m.shape, input, bias, terms.size());
    const auto   weight = [&](const std::string & part, size_t term) {
        const uint32_t    t      = terms[term];
        const uint32_t    base   = m.index.high_is_residual() ? TIER_LOW : TIER_HIGH;
        const std::string suffix = t == base ? "" : std::string(".") + tier_name(t) + ".0";
        return plain_weight{ t == TIER_HIGH ? m.shape.high : m.shape.low,
                             m.file.data(moe_model::name(layer, part, suffix)) };
    };
    graph.set_terms(weight, buft);
    cpu_backend cpu;
    REQUIRE(ggml_backend_graph_compute(cpu.backend, graph.graph) == GGML_STATUS_SUCCESS);
    return graph.output();
}
