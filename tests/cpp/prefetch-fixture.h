// SPDX-License-Identifier: MIT
#pragma once

#include "fake-reader.h"
#include "gguf-builder.h"
#include "indifferent-policy.h"
#include "layer-graph.h"
#include "prefetcher.h"
#include "temp-dir.h"

#include <array>
#include <cmath>
#include <doctest/doctest.h>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace hobbit;

static constexpr int64_t  WIDTH     = 64;
static constexpr uint32_t N_LAYERS  = 4;
static constexpr uint32_t N_EXPERTS = 8;
static constexpr uint32_t N_USED    = 2;
static constexpr uint32_t ALL       = part_bit(PART_UP) | part_bit(PART_GATE) | part_bit(PART_DOWN);

// Probabilities that the routers of a layer give the experts for tokens of one topic; 0 for those not named.
struct belief {
    uint32_t                                layer;
    size_t                                  topic;
    std::vector<std::pair<uint32_t, float>> probabilities;
};

// A model with its cache over the fake reader, and what prefetches into it. A token's router input is a topic.
class engine {
  public:
    fake_reader                 reader;
    stats                       counters;
    expert_index                index;
    std::unique_ptr<predictor>  predictions;
    std::unique_ptr<prefetcher> prefetch;

    // Layers from `border` on have a cache of their own.
    explicit engine(const std::vector<belief> & beliefs, uint32_t n_high = 16, uint32_t n_low = 0,
                    score_thresholds thresholds = {}, uint32_t n_ahead = 3, bool residual = false,
                    uint32_t border = N_LAYERS) :
        border_(border) {
        moe_model model;
        model.n_layers  = N_LAYERS;
        model.n_experts = N_EXPERTS;
        model.n_embd    = WIDTH;
        if (residual) {
            model.add_low_and_residual(file_);
        } else {
            model.add_high(file_);
            model.add_low(file_);
        }
        REQUIRE(index.open(file_.write(dir_.path("m.gguf")), "").ok());
        predictions = std::make_unique<predictor>(index);
        for (uint32_t layer = 0; layer < N_LAYERS && !beliefs.empty(); layer++) {
            set_router(layer, beliefs);
        }
        loader_ = std::make_unique<loader>(reader, counters, 2);
        for (std::unique_ptr<expert_cache> & cache : caches_) {
            cache = std::make_unique<expert_cache>(index, *loader_, counters, expert_cache::pool_place());
            allocate(*cache, TIER_HIGH, n_high);
            allocate(*cache, TIER_LOW, n_low);
        }
        std::vector<prefetcher::layer_place> places;
        for (uint32_t layer = 0; layer < N_LAYERS; layer++) {
            places.push_back({ &cache_of(layer), predictions.get() });
        }
        prefetch = std::make_unique<prefetcher>(index, places, n_ahead, thresholds, counters);
    }

    ~engine() {
        reader.open_gate();
        loader_.reset(); // before the cache, whose memory its threads write into
    }

    expert_cache & cache() { return *caches_[0]; }

    expert_cache & cache_of(uint32_t layer) { return *caches_[layer < border_ ? 0 : 1]; }

    // The layer's router chooses these; they are demanded.
    void choose(uint32_t layer, const std::vector<int32_t> & experts) {
        prefetch->on_routing({ layer, int64_t(experts.size() / N_USED), N_USED, experts, {} });
        for (const int32_t e : experts) {
            REQUIRE(cache_of(layer).acquire({ layer, uint32_t(e) }, TIER_HIGH));
            cache_of(layer).request({ layer, uint32_t(e) }, TIER_HIGH, ALL);
        }
    }

    void look_ahead(uint32_t layer, const std::vector<size_t> & topics = { 0 }) {
        std::vector<float> x(topics.size() * WIDTH, 0.0f);
        for (size_t t = 0; t < topics.size(); t++) {
            x[t * WIDTH + topics[t]] = 1.0f;
        }
        with_tensor(WIDTH, int64_t(topics.size()), x,
                    [&](const ggml_tensor * input) { REQUIRE(prefetch->look_ahead(layer, input, cpu_.backend).ok()); });
    }

    void finish(uint32_t layer, const std::vector<int32_t> & experts) {
        for (const int32_t e : experts) {
            cache_of(layer).release({ layer, uint32_t(e) }, TIER_HIGH);
        }
        prefetch->end_layer(layer);
    }

    void run_layer(uint32_t layer, const std::vector<int32_t> & experts, const std::vector<size_t> & topics = { 0 }) {
        choose(layer, experts);
        look_ahead(layer, topics);
        finish(layer, experts);
    }

    // Makes the expert resident.
    void load(expert_id id, uint32_t tier = TIER_HIGH) {
        REQUIRE(cache().acquire(id, tier));
        cache().request(id, tier, ALL);
        REQUIRE(cache().wait(id, tier, ALL).ok());
        cache().release(id, tier);
    }

    // Until all that was asked for ahead is there.
    void wait(expert_id id, uint32_t tier = TIER_HIGH) {
        while (!cache_of(id.layer).arrived(id, tier, ALL)) {
            std::this_thread::yield();
        }
    }

    // Where the reads of an expert's parts begin.
    std::vector<uint64_t> reads_of(expert_id id, uint32_t tier = TIER_HIGH) const {
        std::vector<uint64_t> offsets;
        for (const uint32_t part : { PART_GATE, PART_UP, PART_DOWN }) {
            const uint64_t offset = index.locate(tier, id.layer, part, id.expert).offset;
            offsets.push_back(offset - offset % file_reader::alignment);
        }
        return offsets;
    }

    template <typename function>
    static void with_tensor(int64_t width, int64_t n_tokens, const std::vector<float> & x, function use) {
        ggml_context *        ctx    = ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true });
        ggml_tensor *         t      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, n_tokens);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
        ggml_backend_tensor_set(t, x.data(), 0, ggml_nbytes(t));
        use(t);
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }

    ggml_backend_t backend() const { return cpu_.backend; }

  private:
    void set_router(uint32_t layer, const std::vector<belief> & beliefs) {
        std::vector<float> weight(N_EXPERTS * WIDTH, -20.0f);
        for (const belief & b : beliefs) {
            for (const auto & [expert, probability] : b.probabilities) {
                if (b.layer == layer) {
                    weight[expert * WIDTH + b.topic] = std::log(probability);
                }
            }
        }
        with_tensor(WIDTH, N_EXPERTS, weight, [&](const ggml_tensor * t) {
            REQUIRE(predictions->set_router(layer, t, nullptr, nullptr, HOBBIT_GATING_SOFTMAX).ok());
        });
    }

    void allocate(expert_cache & cache, uint32_t tier, uint32_t n_slots) {
        if (n_slots > 0) {
            REQUIRE(cache.allocate(tier, n_slots, 0, policy_).ok());
        }
    }

    const uint32_t                               border_;
    temp_dir                                     dir_;
    gguf_builder                                 file_;
    cpu_backend                                  cpu_;
    indifferent_policy                           policy_;
    std::unique_ptr<loader>                      loader_;
    std::array<std::unique_ptr<expert_cache>, 2> caches_; // before the border, and from there on
};

inline std::vector<uint64_t> joined(std::vector<uint64_t> a, const std::vector<uint64_t> & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}
